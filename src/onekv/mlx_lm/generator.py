"""mlx-lm's generators, which tell the caches in advance how long a sequence will be.

With that, the KV of a turn is a single slab, and the server can tell whether a request fits before it starts.
"""

import functools
import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.generate import BatchGenerator as StockBatchGenerator
from mlx_lm.generate import GenerationBatch
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.models import cache as caches_module
from mlx_lm.models.cache import CacheList

from .kv import KVCache
from .loans import footprint
from .slabs import SLABS, STEP, PoolFullError


def expect(caches: list[Any], new: int, max_tokens: int) -> None:
    """`new` tokens of a prompt and then up to `max_tokens` will be stored in each of `caches`."""
    for cache in _growing(caches):
        # Most answers are shorter than what is allowed.
        answer = min(max_tokens, max(STEP, (cache.offset + new) // 8)) if max_tokens >= 0 else STEP
        cache.expect(cache.offset + new + answer)


def bytes_per_token(model: Any) -> int:
    """What a token adds to the caches that grow. The model is asked for one token, of which nothing is computed."""
    caches = caches_module.make_prompt_cache(model)
    for cache in _growing(caches):
        # So that the slabs it counts are as small as can be.
        cache.step = 1
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    return sum(cache.token_bytes for cache in _growing(caches))


def _growing(caches: Iterable[Any]) -> Iterator[KVCache]:
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from _growing(cache.caches)
        elif isinstance(cache, KVCache):
            yield cache


@functools.wraps(stock_generate_step)
def generate_step(prompt: mx.array, model: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    if kwargs.get("prompt_cache") is None:
        kwargs["prompt_cache"] = caches_module.make_prompt_cache(model, max_kv_size=kwargs.get("max_kv_size"))
    embeddings = kwargs.get("input_embeddings")
    expect(kwargs["prompt_cache"], len(prompt if embeddings is None else embeddings), kwargs.get("max_tokens", STEP))
    steps: Iterator[Any] = stock_generate_step(prompt, model, *args, **kwargs)
    return steps


class BatchGenerator(StockBatchGenerator):  # type: ignore[misc]
    """Keeps account of what its sequences hold and may still need."""

    running: ClassVar["weakref.WeakSet[BatchGenerator]"] = weakref.WeakSet()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.running.add(self)
        self._alive: set[int] = set()

    def insert_segments(self, segments: list[list[list[int]]], *args: Any, **kwargs: Any) -> Any:
        uids = super().insert_segments(segments, *args, **kwargs)
        for _, parts, max_tokens, caches, *_ in list(self._unprocessed_sequences)[-len(uids) :]:
            expect(caches, sum(map(len, parts)), max_tokens)
        self._alive.update(uids)
        return uids

    def remove(self, uids: Any, *args: Any, **kwargs: Any) -> Any:
        self._alive.difference_update(uids)
        return super().remove(uids, *args, **kwargs)

    def next(self) -> Any:
        try:
            prompts, generated = super().next()
        except PoolFullError as error:
            logging.error(f"All sequences of the batch end here: {error}")
            prompts, generated = [], self._end_all()
        self._alive.difference_update(response.uid for response in generated if response.finish_reason is not None)
        return prompts, generated

    def _end_all(self) -> list[Any]:
        """Not every layer has stored the step's tokens, so no sequence can continue."""
        self._unprocessed_sequences.clear()
        self._currently_processing.clear()
        for batch in (self._prompt_batch, self._generation_batch):
            batch.filter([])
        response = GenerationBatch.Response
        return [response(uid, 0, mx.zeros(1), "stop", [], []) for uid in sorted(self._alive)]

    def _caches(self) -> Iterator[Any]:
        for sequence in self._unprocessed_sequences:
            yield from sequence[3]
        yield from self._prompt_batch.prompt_cache
        yield from self._generation_batch.prompt_cache

    def footprint(self) -> dict[int, int]:
        """What its sequences hold, by identity: what they share is there once."""
        return dict(part for cache in self._caches() for part in footprint(cache))

    @property
    def prompt_cache_nbytes(self) -> int:
        """Without what a prompt cache counts already."""
        cached = SLABS.cached()
        return sum(size for identity, size in self.footprint().items() if identity not in cached)

    @property
    def outstanding(self) -> int:
        """How many tokens its sequences may still store."""
        generated = zip(self._generation_batch.max_tokens, self._generation_batch._num_tokens, strict=True)
        tokens: int = sum(sum(map(len, sequence[1])) + sequence[2] for sequence in self._unprocessed_sequences)
        tokens += sum(total - done for _, done, total in self._currently_processing)
        tokens += sum(self._prompt_batch.max_tokens)
        tokens += sum(most - count for most, count in generated)
        return tokens
