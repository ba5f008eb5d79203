"""Weights shared by several models, a base and its adapters: in memory once, while one of them is loaded.

`SharedWeights` owns the loaded weights, as a model that no engine runs; each engine has modules of its own over the
same arrays (`models/sharing.py`). It releases them, and so the arrays, when the last model with these weights is
unloaded and the next to be loaded is not one of them. Used by the thread that loads and unloads.
"""

from collections import Counter
from collections.abc import Iterable

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ...models import LoadedModel, load_for
from .spec import ModelSpec


class SharedWeights:
    def __init__(self, specs: Iterable[ModelSpec]) -> None:
        counts = Counter(spec.weights for spec in specs)
        self._several = {weights for weights, count in counts.items() if count > 1}
        self._loaded: dict[tuple[str | None, ...], LoadedModel] = {}

    def of(self, spec: ModelSpec, tokenizer: TokenizerWrapper, progress: bool) -> str | LoadedModel:
        """What the engine of a model is made of: its name, or weights that are loaded, now or for another before."""
        if spec.weights not in self._several:
            return spec.model
        if spec.weights not in self._loaded:
            loaded = load_for(spec.model, spec.engine, tokenizer=tokenizer, progress=progress)
            self._loaded[spec.weights] = loaded
        return self._loaded[spec.weights]

    def holds(self, spec: ModelSpec) -> bool:
        return spec.weights in self._loaded

    def keep(self, specs: Iterable[ModelSpec]) -> None:
        """Let go of what none of `specs` has."""
        kept = {spec.weights for spec in specs}
        self._loaded = {weights: loaded for weights, loaded in self._loaded.items() if weights in kept}
