"""Fill-in-the-middle prompts, for models that were trained for it.

Such a model has special tokens for the text before the gap, the text after it, and the gap; they are found in its
vocabulary.
"""

from typing import Any
from weakref import WeakKeyDictionary

from .backend import Backend
from .errors import BadRequestError

# Before, after, gap; in the order in which each model wants them, which has the gap at the end.
KINDS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)


# Reading a vocabulary takes milliseconds, and every snapshot of a server says whether its model has these.
_known: WeakKeyDictionary[Any, tuple[int, ...] | None] = WeakKeyDictionary()


def marks_of(tokenizer: Any) -> tuple[int, ...] | None:
    """The model's tokens for text before, text after and the gap; None if it was not made for that."""
    if tokenizer not in _known:
        vocabulary = tokenizer.get_vocab()
        kind = next((kind for kind in KINDS if all(mark in vocabulary for mark in kind)), None)
        _known[tokenizer] = tuple(int(vocabulary[mark]) for mark in kind) if kind is not None else None
    return _known[tokenizer]


def around(backend: Backend, prompt: str | list[int], suffix: str) -> list[int]:
    """The tokens after which the text between `prompt` and `suffix` comes. Raises BadRequestError if there are none."""
    marks = marks_of(backend.tokenizer)
    if marks is None:
        raise BadRequestError(f"{backend.name} has no tokens for filling in the middle", "suffix")
    before, after, gap = marks
    # What the tokenizer puts before every text, if anything, comes first of all.
    start = backend.tokenizer.encode("")
    return [*start, before, *_encoded(backend, prompt), after, *_encoded(backend, suffix), gap]


def _encoded(backend: Backend, text: str | list[int]) -> list[int]:
    if isinstance(text, list):
        return backend.encode(text)
    return [int(token) for token in backend.tokenizer.encode(text, add_special_tokens=False)]
