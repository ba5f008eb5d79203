"""The library's front: a model, its KV memory, and calls that return text.

An `LLM` owns one engine and is driven by the thread that calls it; use it from one thread at a time. Several streams
may be open at once: whoever asks for text moves all of them on.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, overload

import mlx.core as mx
from mlx.nn.layers.base import Module
from tqdm import tqdm

from .config import Settings
from .engine import Engine, Request, Sampling, Timings
from .engine.request import FinishReason
from .errors import OneKVError, PromptError, SettingError
from .memory import cpu_encoded
from .memory.calibration import calibration_tokens
from .memory.formats import parse
from .memory.plan import Plan, make_plan
from .models import DEFAULT_MODEL, load_model
from .prefix.figures import PrefixStats
from .tiers.base import TierStats
from .tiers.opening import open_tier

log = logging.getLogger("onekv")

Prompt = str | Sequence[int]
Message = dict[str, Any]


@dataclass(frozen=True)
class Completion:
    """What a request produced. `tokens` are all generated ids, with the stop token; `text` is without it."""

    text: str
    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int
    finish_reason: FinishReason | None
    timings: Timings


@dataclass(frozen=True)
class PoolStats:
    """Blocks of one group: held by running sequences, idle (cached, not in use), pinned and not in use, or free.

    `reserved` of the idle and free ones are promised to running sequences, `available` are not.
    """

    group: str
    layers: int
    block_bytes: int
    blocks: int
    held: int
    peak_held: int
    idle: int
    peak_idle: int
    pinned: int
    free: int
    reserved: int
    available: int


@dataclass(frozen=True)
class MemoryStats:
    """Bytes: by owner, and as MLX counts them for the whole process."""

    weights: int
    pool: int
    states: int
    active: int
    peak: int
    buffer_cache: int


@dataclass(frozen=True)
class Stats:
    pools: tuple[PoolStats, ...]
    memory: MemoryStats
    # None when the prefix cache is off.
    prefix: PrefixStats | None
    # Colder places than the pool: the disk cache, if there is one.
    tiers: tuple[TierStats, ...]
    waiting: int
    running: int
    # Why sequences are decoded one by one instead of as a batch, if they are.
    one_by_one: str | None


class Stream(Iterator[str]):
    """Pieces of text as they are generated. `completion` is what there is so far; `close` ends it early."""

    def __init__(self, llm: "LLM", request: Request) -> None:
        self._llm, self.request = llm, request
        self._detokenizer = llm.tokenizer.detokenizer
        self._read = 0
        self._text: list[str] = []

    def __next__(self) -> str:
        while True:
            piece = self._take()
            if piece:
                self._text.append(piece)
                return piece
            if self.request.finished and self._read == len(self.request.tokens):
                if self.request.error is not None:
                    raise self.request.error
                raise StopIteration
            self._llm._step([self.request])

    def _take(self) -> str:
        """Text of the tokens that came since the last call."""
        new = self.request.tokens[self._read :]
        if not new:
            return ""
        self._read = len(self.request.tokens)
        for token in new:
            if token not in self._llm.stop_tokens:
                self._detokenizer.add_token(token)
        if self.request.finished:
            self._detokenizer.finalize()
        return str(self._detokenizer.last_segment)

    def close(self) -> None:
        """Stop generating and release everything; what was generated stays in `completion`."""
        if not self.request.finished:
            self._llm.engine.cancel([self.request])

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

    `model` is a name (`smollm2-135m`), a Hugging Face id, a folder in mlx-lm's format, a `.gguf` file, or an mlx-lm
    model object together with its `tokenizer`. The other keywords are the fields of `Settings`.
    """

    def __init__(
        self,
        model: str | Module = DEFAULT_MODEL,
        *,
        tokenizer: Any = None,
        progress: bool = True,
        **settings: Any,
    ) -> None:
        self.settings = Settings.resolve(settings)
        if isinstance(model, str):
            loaded = load_model(model, dtype=self.settings.dtype, progress=progress)
            self.name, self.model = loaded.name, loaded.model
            self.tokenizer = tokenizer or loaded.tokenizer
            self.context: int | None = loaded.config.get("max_position_embeddings")
        else:
            if tokenizer is None:
                raise SettingError("an mlx-lm model was given without its tokenizer; pass tokenizer=...")
            self.name, self.model, self.tokenizer = type(model).__module__, model, tokenizer
            self.context = None
        kv_format = parse(self.settings.kv_format)
        calibration = calibration_tokens(self.tokenizer) if kv_format.centred else ()
        self.plan: Plan = make_plan(self.model, self.settings, self.context, calibration)
        self.plan.check()
        if kv_format.warning is not None:
            log.warning("onekv: %s", kv_format.warning)
        if not kv_format.plain and mx.default_device() == mx.cpu and (reason := cpu_encoded.why_not()) is not None:
            log.warning("onekv: %s", reason)
        if mx.default_device() == mx.gpu:
            # MLX's own cache of freed buffers must not undo the plan.
            mx.set_cache_limit(self.plan.workspace)
        self.stop_tokens: set[int] = set(self.tokenizer.eos_token_ids)
        self._engine: Engine | None = None
        tier = open_tier(self.settings, self.plan, self.model, self.name)
        try:
            self._engine = Engine(
                self.model,
                self.plan,
                self.stop_tokens,
                self.settings.prefix_cache,
                self.settings.decode_steps,
                tier,
                self.settings.disk_policy == "write_through",
                StoreBar() if progress else None,
            )
        finally:
            if self._engine is None and tier is not None:
                tier.close()

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
        many = isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt)
        if isinstance(prompt, list) and not prompt:
            raise PromptError("the prompt is empty; it must have at least one token")
        prompts: list[Any] = list(prompt) if many else [prompt]
        requests = [self._request(item, max_tokens, dict(sampling)) for item in prompts]
        for request in requests:
            self.engine.validate(request)
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
        if self.tokenizer.chat_template is None:
            raise PromptError(f"{self.name} has no chat template; use generate with a plain prompt")
        tokens = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return [int(token) for token in tokens]

    def unpin(self, prompt: Prompt, salt: str = "") -> None:
        """Let the blocks of a prompt that was generated from with `pin=True` be evicted again."""
        if self.engine.prefix is not None:
            self.engine.prefix.unpin(self._request(prompt, 1, {}).prompt, salt)

    def clear_cache(self) -> None:
        """Forget all cached conversations of this model that are neither running nor pinned, on disk, too."""
        if self.engine.prefix is not None:
            self.engine.prefix.clear()

    def stats(self) -> Stats:
        engine = self.engine
        pools = tuple(
            PoolStats(
                group=str(pool.group.rule),
                layers=len(pool.group.layers),
                block_bytes=pool.block_bytes,
                blocks=pool.blocks,
                held=pool.held,
                peak_held=pool.peak_held,
                idle=pool.idle,
                peak_idle=pool.peak_idle,
                pinned=int((pool.pinned & (pool.references == 0)).sum()),
                free=pool.free,
                reserved=pool.reserved,
                available=pool.available,
            )
            for pool in engine.memory.pools
        )
        memory = MemoryStats(
            weights=self.plan.weights,
            pool=sum(pool.nbytes for pool in engine.memory.pools),
            states=engine.memory.state_bytes,
            active=mx.get_active_memory(),
            peak=mx.get_peak_memory(),
            buffer_cache=mx.get_cache_memory(),
        )
        running = len(engine.running) + len(engine.prefilling) + len(engine.loading)
        prefix = engine.prefix.stats() if engine.prefix is not None else None
        tiers = (engine.tier.stats(),) if engine.tier is not None else ()
        return Stats(pools, memory, prefix, tiers, len(engine.waiting), running, engine.one_by_one)

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
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError("the prompt is empty; it must have at least one token")
            if any("\ud800" <= character <= "\udfff" for character in prompt):
                raise PromptError("the prompt has half a character (a lone surrogate); it must be valid text")
            tokens = self.tokenizer.encode(prompt)
        else:
            tokens = [int(token) for token in prompt]
        return Request(tokens, max_tokens, Sampling(**sampling), salt, pin)

    def _step(self, requests: list[Request]) -> None:
        """Move the engine on; whatever interrupts it, `requests` hold nothing afterwards."""
        try:
            self.engine.step()
        except BaseException:
            self.engine.cancel(requests)
            raise
