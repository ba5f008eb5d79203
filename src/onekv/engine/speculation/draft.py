"""Guesses of a draft model: its own next tokens, one at a time, for all requests together.

It decodes over the tables of the larger model, a few tokens ahead. Then the sequences are reset, and the guesses that
it has stored are stored again by both models when they are verified. So between two steps, both models have stored the
same tokens, whatever was guessed.
"""

import mlx.core as mx
import numpy as np

from ...memory.device import settle
from ...memory.kv import KVMemory
from ...models.draft import DraftAlone, WithDraft
from ..known import Tried
from ..request import Request
from ..sampling import guess
from ..selftest import compile_decode, forward, set_direct


class Drafting:
    def __init__(self, model: WithDraft, memory: KVMemory, one_by_one: str | None, tried: Tried | None) -> None:
        """Where the model was `tried` before, that is not done again."""
        self._alone, self._memory = DraftAlone(model), memory
        if tried is not None:
            self.compiled = tried.draft_by(self._alone, memory) if tried.draft_by is not None else None
            return
        # Decode steps of the larger one were tried; these are of the smaller one.
        set_direct(self._alone, memory)
        self.compiled, _ = compile_decode(self._alone, memory, one_by_one)

    def guess(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in requests]
        lengths = [request.sequence.length for request in requests]
        for request, length in zip(requests, lengths, strict=True):
            request.sequence.anchor = length
        try:
            for place in range(max(counts)):
                some = [index for index, count in enumerate(counts) if count > place]
                last = [found[index][-1] if place else requests[index].next_input for index in some]
                asked = [requests[index] for index in some]
                logits = self._forward(asked, mx.array(last))
                tokens = guess(logits, asked, [len(request.tokens) + place for request in asked])
                settle(tokens, self._memory.arrays())
                for index, token in zip(some, np.array(tokens).tolist(), strict=True):
                    found[index].append(token)
        finally:
            for request, length in zip(requests, lengths, strict=True):
                self._memory.truncate(request.sequence, length)
        return found

    def _forward(self, requests: list[Request], tokens: mx.array) -> mx.array:
        sequences, ones = [request.sequence for request in requests], [1] * len(requests)
        if self.compiled is not None:
            return self.compiled(sequences, tokens, ones)
        return forward(self._alone, self._memory, sequences, tokens, ones)
