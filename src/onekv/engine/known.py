"""What is known of a model from its last load, so that it need not be determined again.

The same weights, run in the same way on the same device, behave the same: whether rows can be decoded together, how far
several tokens in a step are from one at a time, what the weights' digest is. A `Known` belongs to the code that loads a
model repeatedly; a server has one for each of its models, for as long as it runs. It contains only verdicts and
numbers, a few kilobytes: neither weights nor KV, and no references to them.

It is used by the thread that loads the model. Its contents are valid for one model and one set of settings (`see`); if
these or the files change, it is reset.
"""

from dataclasses import dataclass

from mlx.nn.layers.base import Module

from ..memory.compiled import CompiledDecode
from ..memory.looped import LoopedDecode
from ..models.identity import identity
from .selftest import Several


@dataclass(frozen=True)
class Tried:
    """What trying a model out has shown (`selftest`)."""

    # Of each layer, whether it returns stand-ins from decode steps.
    direct: tuple[bool, ...]
    one_by_one: str | None
    together: bool
    # What compiles decode steps, or None and the reason; of the draft model, too, if there is one.
    compiled_by: type[CompiledDecode] | type[LoopedDecode] | None
    uncompiled: str | None
    draft_by: type[CompiledDecode] | type[LoopedDecode] | None
    several: Several


class Known:
    def __init__(self) -> None:
        # How often the model was tried out, whatever its files and settings were.
        self.trials = 0
        self._of: str | None = None
        self._forget()

    def _forget(self) -> None:
        self.tried: Tried | None = None
        # From plain KV, in nats, if its KV is encoded.
        self.divergence: float | None = None
        # `models.identity`, if there is a tier that needs it.
        self.identity: str | None = None

    def identify(self, model: Module) -> str:
        """`models.identity`, which reads all weights."""
        if self.identity is None:
            self.identity = identity(model)
        return self.identity

    def see(self, of: str | None) -> None:
        """It is about a model that is described by `of`: all that decides what the model does. None: nobody knows."""
        if of is None or of != self._of:
            self._forget()
        self._of = of
