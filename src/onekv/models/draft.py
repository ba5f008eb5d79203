"""A model and its draft model, as one model.

Every token is stored by both: the layers of the draft model are additional layers of the same model, with KV in the
same blocks. So the KV of both is in one budget, and is shared, cached, written to disk and restored together, and after
a hit the draft model has the same context as the larger one.
"""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from ..errors import SettingError


class WithDraft(Module):
    def __init__(self, target: Module, draft: Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.target, self.draft = target, draft
        # What names the model (`identity`).
        self.args = (getattr(target, "args", None), getattr(draft, "args", None))
        # Where the caches of the smaller one begin.
        self.first_of_draft = len(make_prompt_cache(target))

    def make_cache(self) -> list[Any]:
        return [*make_prompt_cache(self.target), *make_prompt_cache(self.draft)]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """The logits of the larger one; when they are computed, both have stored the tokens."""
        guessed = self.draft(tokens, cache=cache[self.first_of_draft :])
        logits = self.target(tokens, cache=cache[: self.first_of_draft])
        # Kernels store a token when their output is computed, and the draft model's is not used otherwise.
        stored: mx.array = mx.depends(logits, guessed)
        return stored


class DraftAlone(Module):
    """The smaller one of two, as a model that takes the caches of both."""

    def __init__(self, pair: WithDraft) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pair = pair

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits: mx.array = self.pair.draft(tokens, cache=cache[self.pair.first_of_draft :])
        return logits


def check_vocabularies(target: Any, draft: Any, name: str) -> None:
    """Raises SettingError if a tokenizer's ids are not those of the other. Without tokenizers, nothing is known."""
    if target is None or draft is None:
        return
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    differ = sorted(set(ours.items()) ^ set(theirs.items()), key=lambda item: (item[1], item[0]))
    word, number = differ[0]
    raise SettingError(
        f"--draft-model is {name!r}, whose vocabulary differs from the model's in {len(differ)} entries, "
        f"the first is {word!r} with id {number}; a draft model must have the same tokenizer"
    )
