"""The library's front: a model, its KV memory, and calls that return text.

An `LLM` owns one engine and is driven by the thread that calls it; use it from one thread at a time. Several streams
may be open at once: whoever asks for text moves all of them on.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import TracebackType
from typing import Any, overload

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tqdm import tqdm

from .config import Settings, whole
from .engine import Engine, Request, Sampling, Timings
from .engine.request import FinishReason
from .errors import OneKVError, PromptError, SettingError, TooLongError
from .memory.attention.numba import encoded as cpu_encoded
from .memory.formats import KVFormat, parse
from .memory.layout.calibration import calibration_tokens
from .memory.plan import Plan, make_plan
from .models import DEFAULT_MODEL, context_length, load_model
from .stats import MemoryStats, PoolStats, Stats, read_stats
from .tiers.opening import open_tier

__all__ = ["LLM", "Completion", "MemoryStats", "Message", "PoolStats", "Stats", "Stream"]

log = logging.getLogger("onekv")

Prompt = str | Sequence[int]
Message = dict[str, Any]


@dataclass(frozen=True)
class Completion:
    """What a request produced. `tokens` are all generated ids, with the stop token; `text` is without it.

    `text` is empty where the LLM has no tokenizer.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int
    finish_reason: FinishReason | None
    timings: Timings


class Stream(Iterator[str]):
    """Pieces of text as they are generated. `completion` is what there is so far; `close` ends it early.

    Where the LLM has no tokenizer the pieces are empty, and one comes with every step that gave a token.
    """

    def __init__(self, llm: "LLM", request: Request) -> None:
        self._llm, self.request = llm, request
        self._detokenizer = llm.tokenizer.detokenizer if llm.tokenizer is not None else None
        self._read = 0
        self._text: list[str] = []

    def __next__(self) -> str:
        while True:
            new = self.request.tokens[self._read :]
            self._read += len(new)
            piece = self._decode(new)
            if piece or (new and self._detokenizer is None):
                self._text.append(piece)
                return piece
            if self.request.finished:
                if self.request.error is not None:
                    raise self.request.error
                self._llm._ended()
                raise StopIteration
            self._llm._step([self.request])

    def _decode(self, tokens: list[int]) -> str:
        """The text of further tokens."""
        if self._detokenizer is None or not tokens:
            return ""
        for token in tokens:
            if token not in self._llm.stop_tokens:
                self._detokenizer.add_token(token)
        if self.request.finished:
            self._detokenizer.finalize()
        return str(self._detokenizer.last_segment)

    def close(self) -> None:
        """Stop generating and release everything; what was generated stays in `completion`."""
        if not self.request.finished:
            self._llm.engine.cancel([self.request])
            self._llm._ended()

    @property
    def completion(self) -> Completion:
        request = self.request
        return Completion(
            text="".join(self._text),
            tokens=list(request.tokens),
            prompt_tokens=len(request.prompt),
            cached_tokens=request.cached_tokens,
            finish_reason=request.finish_reason,
            timings=request.timings,
        )


class StoreBar:
    """Shows how far storing the cache on disk is, if that takes longer than a second."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = tqdm(total=total, desc="to disk", unit="B", unit_scale=True, delay=1.0, disable=None)
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.close()


class LLM:
    """A language model with all its KV in one preallocated pool.

    `model` is a name (`smollm2-135m`), a Hugging Face id, a folder in mlx-lm's format, a `.gguf` file (as text or a
    path), or an mlx-lm model object together with its `tokenizer`. A model object without one takes and gives token ids
    alone: nothing but `max_tokens` ends an answer. The other keywords are the fields of `Settings`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Module = DEFAULT_MODEL,
        *,
        tokenizer: Any = None,
        progress: bool = True,
        **settings: Any,
    ) -> None:
        self.settings = Settings.resolve(settings)
        kv_format = parse(self.settings.kv_format)
        # The most tokens the model was made for, where that is known.
        self.context: int | None = None
        if isinstance(model, str | os.PathLike):
            loaded = load_model(os.fspath(model), dtype=self.settings.dtype, progress=progress)
            self.name, self.model = loaded.name, loaded.model
            self.context = context_length(loaded.config)
            tokenizer = tokenizer or loaded.tokenizer
        elif isinstance(model, Module):
            self.name, self.model = type(model).__module__, model
        else:
            raise SettingError(f"the model is {model!r}; it must be a name, a path or an mlx-lm model")
        if tokenizer is not None and not isinstance(tokenizer, TokenizerWrapper):
            tokenizer = TokenizerWrapper(tokenizer)
        self.tokenizer: Any = tokenizer
        calibration = calibration_tokens(tokenizer) if kv_format.centred and tokenizer is not None else ()
        self.plan: Plan = make_plan(self.model, self.settings, self.context, calibration)
        self.plan.check()
        self._warn(kv_format)
        if mx.default_device() == mx.gpu:
            # MLX's own cache of freed buffers must not undo the plan.
            mx.set_cache_limit(self.plan.workspace)
        self.stop_tokens: set[int] = set(tokenizer.eos_token_ids) if tokenizer is not None else set()
        self._engine: Engine | None = None
        tier = open_tier(self.settings, self.plan, self.model, self.name)
        try:
            self._engine = Engine(
                self.model,
                self.plan,
                self.stop_tokens,
                self.settings,
                [tier] if tier is not None else [],
                StoreBar() if progress else None,
            )
        finally:
            if self._engine is None and tier is not None:
                tier.close()

    def _warn(self, kv_format: KVFormat) -> None:
        if kv_format.warning is not None:
            log.warning("onekv: %s", kv_format.warning)
        if kv_format.centred and self.tokenizer is None:
            log.warning(
                "onekv: --kv-format %s without a tokenizer: keys are not centred, which makes answers worse; "
                "pass tokenizer=..., or use q8",
                kv_format,
            )
        if not kv_format.plain and mx.default_device() == mx.cpu and (reason := cpu_encoded.why_not()) is not None:
            log.warning("onekv: %s", reason)

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise OneKVError("this LLM is closed")
        return self._engine

    @overload
    def generate(self, prompt: Prompt, max_tokens: int = ..., **sampling: Any) -> Completion: ...
    @overload
    def generate(self, prompt: list[Prompt], max_tokens: int = ..., **sampling: Any) -> list[Completion]: ...

    def generate(
        self, prompt: Prompt | list[Prompt], max_tokens: int = 256, **sampling: Any
    ) -> Completion | list[Completion]:
        """Complete a prompt (text or token ids), or each of a list of prompts, as one batch.

        Sampling: temperature (0, the default, is greedy), top_p, top_k, min_p, seed. `salt`: only requests of the same
        salt share cached blocks. `pin=True` keeps the prompt cached until `unpin`.
        """
        many = isinstance(prompt, list) and not all(isinstance(item, Integral) for item in prompt)
        if isinstance(prompt, list) and not prompt:
            raise PromptError("the prompt is empty; it must have at least one token")
        prompts: list[Any] = list(prompt) if many else [prompt]
        requests = [self._request(item, max_tokens, dict(sampling)) for item in prompts]
        for request in requests:
            self._validate(request)
        for request in requests:
            self.engine.submit(request)
        streams = [Stream(self, request) for request in requests]
        completions = []
        try:
            for stream in streams:
                for _ in stream:
                    pass
                completions.append(stream.completion)
        finally:
            self.engine.cancel(requests)
        return completions if many else completions[0]

    def stream(self, prompt: Prompt, max_tokens: int = 256, **sampling: Any) -> Stream:
        """Like `generate` for one prompt, but gives the text piece by piece."""
        request = self._request(prompt, max_tokens, dict(sampling))
        self._validate(request)
        self.engine.submit(request)
        return Stream(self, request)

    def chat(self, messages: list[Message], max_tokens: int = 256, **sampling: Any) -> Completion:
        """The model's next message after `messages`: [{"role": "user", "content": "..."}, ...]."""
        return self.generate(self.chat_tokens(messages), max_tokens, **sampling)

    def stream_chat(self, messages: list[Message], max_tokens: int = 256, **sampling: Any) -> Stream:
        return self.stream(self.chat_tokens(messages), max_tokens, **sampling)

    def chat_tokens(self, messages: list[Message]) -> list[int]:
        """The tokens that `messages` become under the model's chat template."""
        if not messages:
            raise PromptError("there are no messages; give at least one")
        if self.tokenizer is None:
            raise PromptError("messages need the model's tokenizer; pass tokenizer=... to LLM, or give token ids")
        if self.tokenizer.chat_template is None:
            raise PromptError(f"{self.name} has no chat template; use generate with a plain prompt")
        tokens = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return [int(token) for token in tokens]

    def unpin(self, prompt: Prompt, salt: str = "") -> None:
        """Let the blocks of a prompt that was generated from with `pin=True` be evicted again."""
        self.engine.prefix.unpin(self._request(prompt, 1, {}).prompt, salt)

    def clear_cache(self) -> None:
        """Forget all cached conversations of this model that are neither running nor pinned, on disk, too."""
        self.engine.prefix.clear()

    def stats(self) -> Stats:
        return read_stats(self.engine)

    def check_integrity(self) -> None:
        """Raises IntegrityError if any block is lost, held twice or miscounted."""
        self.engine.check_integrity()

    def close(self) -> None:
        """Release the pool; what is cached goes to the disk cache, if there is one, else it is gone.

        The LLM cannot be used afterwards. Closing twice is allowed.
        """
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _request(self, prompt: Prompt, max_tokens: int, sampling: dict[str, Any]) -> Request:
        salt, pin = sampling.pop("salt", ""), sampling.pop("pin", False)
        known = Sampling.__dataclass_fields__
        unknown = [name for name in sampling if name not in known]
        if unknown:
            raise SettingError(f"unknown option {unknown[0]!r}; there are max_tokens, {', '.join(known)}, salt, pin")
        count = whole()(max_tokens, "--max-tokens")
        return Request(self._tokens(prompt), count, Sampling(**sampling), salt, pin)

    def _tokens(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            listed = isinstance(prompt, Iterable) and not isinstance(prompt, bytes)
            tokens: list[Any] = list(prompt) if listed else [None]
            if not all(isinstance(token, Integral) for token in tokens):
                raise PromptError(f"the prompt is {str(prompt)[:80]}; it must be text or a list of token ids")
            return [int(token) for token in tokens]
        if not prompt:
            raise PromptError("the prompt is empty; it must have at least one token")
        if self.tokenizer is None:
            raise PromptError("a text needs the model's tokenizer; pass tokenizer=... to LLM, or give token ids")
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise PromptError("the prompt has half a character (a lone surrogate); it must be valid text")
        return [int(token) for token in self.tokenizer.encode(prompt)]

    def _validate(self, request: Request) -> None:
        """Raises if the request can never be served, or is longer than the model was made for."""
        self.engine.validate(request)
        # With `max_kv_size` the model never sees more than that at once.
        if self.context is None or self.settings.max_kv_size is not None or request.max_length <= self.context:
            return
        raise TooLongError(
            f"the prompt has {len(request.prompt)} tokens and max_tokens is {request.max_tokens}: {request.max_length} "
            f"tokens in all, but the model's context is {self.context}; shorten the prompt or lower max_tokens"
        )

    def _ended(self) -> None:
        """After a request; with `check_integrity` all blocks are counted where nothing else runs."""
        if self.settings.check_integrity and self.engine.idle:
            self.engine.check_integrity()

    def _step(self, requests: list[Request]) -> None:
        """Move the engine on; whatever interrupts it, `requests` hold nothing afterwards."""
        try:
            self.engine.step()
        except BaseException:
            self.engine.cancel(requests)
            raise
