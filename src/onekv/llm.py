"""The library's interface: a model, its KV memory, and calls that return text.

An `LLM` owns one engine, which runs in the thread that calls it; use it from one thread at a time (`AsyncLLM` is for
event loops). Several streams may be open at once: reading from one advances all of them (`streams.py`).
"""

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper

from . import ask
from .ask import Message, Prompt
from .completion import Completion, Freed, Probe
from .config import Settings
from .engine import Engine, Request, Sampling, TextOutput, divergence
from .engine.known import Known
from .engine.notices import notices
from .engine.runner import Runner
from .engine.view import MemoryStats, Stats, read_stats
from .errors import OneKVError, SettingError, TooLongError
from .memory.figures import PoolStats
from .memory.formats import KVFormat, parse
from .memory.kv import KVMemory
from .memory.layout.calibration import calibration_tokens
from .memory.plan import Plan, make_plan
from .models import DEFAULT_MODEL, LoadedModel, context_length, load_for, share
from .models.adapter import check_no_adapter
from .models.draft import WithDraft, check_vocabularies
from .models.templates import with_template
from .parallel import join
from .parallel.guard import STEP_LIMIT
from .streams import BatchStream, Driver, StoreBar, Stream
from .tiers.base import Tier
from .tiers.opening import open_tiers
from .tiers.remote.opening import check as check_remote
from .units import format_size

__all__ = [
    "LLM",
    "BatchStream",
    "Completion",
    "Freed",
    "MemoryStats",
    "Message",
    "PoolStats",
    "Probe",
    "Prompt",
    "Sampling",
    "Stats",
    "Stream",
]

log = logging.getLogger("onekv")


class LLM:
    """A language model with all its KV in one preallocated pool.

    `model` is a name (`smollm2-135m`), a Hugging Face id, a folder in mlx-lm's format, a `.gguf` file (as text or a
    path), or an mlx-lm model object together with its `tokenizer`. A model object without one takes and returns only
    token ids, and only `max_tokens` ends an answer. If a `tokenizer` is given, the model's own is not loaded. LLMs
    created from the same `LoadedModel` (`models.load_for`) share its weights. `chat_template` (Jinja) replaces the
    model's own. `known` keeps what a load finds out for the next one. Other keywords are the fields of `Settings`.

    Under `mlx.launch` the model is sharded over all ranks (docs/scale.md). Only rank 0 gets an LLM; on the others the
    constructor follows rank 0 and then exits. All ranks exit if a forward pass takes more than `step_limit` seconds.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Module | LoadedModel = DEFAULT_MODEL,
        *,
        tokenizer: Any = None,
        chat_template: str | None = None,
        progress: bool = True,
        step_limit: float = STEP_LIMIT,
        known: Known | None = None,
        **settings: Any,
    ) -> None:
        self.settings = Settings.resolve(settings)
        check_remote(self.settings)
        # Not None on rank 0 of several.
        self._leader = join(self.settings, model, step_limit)
        try:
            self._open(model, tokenizer, chat_template, progress, known or Known())
        except BaseException:
            if self._leader is not None:
                self._leader.desert()
            raise

    def _open(
        self,
        model: str | os.PathLike[str] | Module | LoadedModel,
        tokenizer: Any,
        chat_template: str | None,
        progress: bool,
        known: Known,
    ) -> None:
        leader, kv_format = self._leader, parse(self.settings.kv_format)
        # The most tokens the model was made for, where that is known.
        self.context: int | None = None
        # The file or folder it is from, what its config.json says, and its name without its adapter, if it has one.
        self.path: Path | None = None
        self.config: dict[str, Any] = {}
        self.base: str | None = None
        # What its files look like; None where that does not tell what the model is.
        self._seen: str | None = None
        if tokenizer is not None and not isinstance(tokenizer, TokenizerWrapper):
            tokenizer = TokenizerWrapper(tokenizer)
        if isinstance(model, str | os.PathLike | LoadedModel):
            loaded = self._load(model, tokenizer, progress)
            self.name, self.model, self.path = loaded.name, loaded.model, loaded.path
            self.config, self.base, self._seen = loaded.config, loaded.base, loaded.seen
            self.context = context_length(loaded.config)
            tokenizer = tokenizer or loaded.tokenizer
        elif isinstance(model, Module):
            check_no_adapter(self.settings.adapter)
            self.name, self.model = type(model).__module__, model
        else:
            raise SettingError(f"the model is {model!r}; it must be a name, a path or an mlx-lm model")
        if tokenizer is not None and chat_template is not None:
            tokenizer = with_template(tokenizer, chat_template)
        self.tokenizer: Any = tokenizer
        if self.settings.draft_model is not None:
            self.model = self._with_draft(self.settings.draft_model, progress)
        text = calibration_tokens(tokenizer) if tokenizer is not None and not kv_format.plain else []
        calibration = text if kv_format.centred else ()
        plan = make_plan if leader is None else leader.plan
        self.plan: Plan = plan(self.model, self.settings, self.context, calibration)
        self.plan.check()
        # All that decides what the model does here. Of several ranks, only one's files are seen.
        decides = f"{self._seen} {vars(self.settings)} {self.plan.blocks} {text} {mx.default_device()}"
        known.see(decides if self._seen is not None and leader is None else None)
        self._start(kv_format, text, progress, known)

    def _start(self, kv_format: KVFormat, text: list[int], progress: bool, known: Known) -> None:
        """The engine for a model that is loaded and planned, on `text` if its format is tried on one."""
        leader, tokenizer = self._leader, self.tokenizer
        for notice in notices(self.settings, kv_format, tokenizer):
            log.warning("onekv: %s", notice)
        if mx.default_device() == mx.gpu:
            # MLX's own cache of freed buffers must not undo the plan.
            mx.set_cache_limit(self.plan.workspace)
        self.stop_tokens: set[int] = set(tokenizer.eos_token_ids) if tokenizer is not None else set()
        self._driver: Driver | None = None
        tiers: list[Tier] = []
        try:
            # The file for the turns that a server remembers, next to the disk cache.
            opened = partial(open_tiers, identify=known.identify) if leader is None else leader.open_tiers
            tiers, self.turns_file = opened(self.settings, self.plan, self.model, self.name)
            memory = KVMemory if leader is None else leader.memory
            parts = (self.model, self.plan, self.stop_tokens, self.settings, tiers, StoreBar() if progress else None)
            engine = Engine(*parts, make_runner=partial(Runner, known=known), make_memory=memory)
            for reason in engine.memory.unused_kernels:
                log.warning("onekv: attention by MLX's operations: %s", reason)
            # Of several ranks, none can run the model alone. What `max_kv_size` forgets, plain KV would not.
            shown = text[: self.settings.max_kv_size] if leader is None else []
            if shown and (told := divergence.check(engine, kv_format, shown, known)) is not None:
                log.warning("onekv: %s", told)
            self._driver = Driver(engine, self.settings.check_integrity)
        finally:
            while tiers and self._driver is None:
                tiers.pop().close()

    def _load(self, model: str | os.PathLike[str] | LoadedModel, tokenizer: Any, progress: bool) -> LoadedModel:
        adapter = self.settings.adapter
        if isinstance(model, LoadedModel):
            return share(model, self.settings.dtype, adapter)
        if self._leader is not None:
            return self._leader.load(os.fspath(model), self.settings, progress)
        return load_for(os.fspath(model), self.settings, adapter=adapter, tokenizer=tokenizer, progress=progress)

    def _with_draft(self, name: str, progress: bool) -> WithDraft:
        loaded = load_for(name, self.settings, progress=progress)
        check_vocabularies(self.tokenizer, loaded.tokenizer, name)
        self._seen = f"{self._seen} {loaded.seen}" if self._seen is not None and loaded.seen is not None else None
        return WithDraft(self.model, loaded.model)

    @property
    def ranks(self) -> int:
        """The number of processes that the model is sharded over."""
        return 1 if self._leader is None else self._leader.ranks

    @property
    def driver(self) -> Driver:
        if self._driver is None:
            raise OneKVError("this LLM is closed")
        return self._driver

    @property
    def engine(self) -> Engine:
        return self.driver.engine

    @overload
    def generate(
        self, prompt: Prompt, max_tokens: int | None = ..., *, sampling: Sampling | None = ..., **options: Any
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: list[Prompt],
        max_tokens: int | None = ...,
        *,
        sampling: Sampling | Sequence[Sampling] | None = ...,
        **options: Any,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | list[Prompt],
        max_tokens: int | None = None,
        *,
        sampling: Sampling | Sequence[Sampling] | None = None,
        **options: Any,
    ) -> Completion | list[Completion]:
        """Complete a prompt (text or token ids), or each of a list of prompts, as one batch.

        `options` are the fields of `Sampling` (temperature, top_p, stop, ...) and override those of `sampling`, which
        may be a list with one for each prompt. `max_tokens` defaults to 256. Only requests with the same `salt` share
        cached blocks. `pin=True` keeps the prompt cached until `unpin`. `prediction` is text (or token ids) that much
        of the answer will repeat, or a list with one for each prompt: where it is right, it makes the answer faster.
        """
        requests, many = self.requests(prompt, max_tokens, sampling, options)
        pairs = [(request, self.output(request)) for request in requests]
        with BatchStream(self.driver, pairs) as batch:
            for _ in batch:
                pass
        return batch.completions if many else batch.completions[0]

    @overload
    def stream(
        self, prompt: Prompt, max_tokens: int | None = ..., *, sampling: Sampling | None = ..., **options: Any
    ) -> Stream: ...
    @overload
    def stream(
        self,
        prompt: list[Prompt],
        max_tokens: int | None = ...,
        *,
        sampling: Sampling | Sequence[Sampling] | None = ...,
        **options: Any,
    ) -> BatchStream: ...

    def stream(
        self,
        prompt: Prompt | list[Prompt],
        max_tokens: int | None = None,
        *,
        sampling: Sampling | Sequence[Sampling] | None = None,
        **options: Any,
    ) -> Stream | BatchStream:
        """Like `generate`, but yields text as it is generated; for a list of prompts, with the index of each."""
        requests, many = self.requests(prompt, max_tokens, sampling, options)
        pairs = [(request, self.output(request)) for request in requests]
        return BatchStream(self.driver, pairs) if many else Stream(self.driver, pairs)

    def chat(
        self,
        messages: list[Message],
        max_tokens: int | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        sampling: Sampling | None = None,
        **options: Any,
    ) -> Completion:
        """The model's next message after `messages`: [{"role": "user", "content": "..."}, ...].

        `chat_template_kwargs` are passed to the model's chat template, such as {"enable_thinking": False}.
        """
        tokens = self.chat_tokens(messages, chat_template_kwargs)
        return self.generate(tokens, max_tokens, sampling=sampling, **options)

    def stream_chat(
        self,
        messages: list[Message],
        max_tokens: int | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        sampling: Sampling | None = None,
        **options: Any,
    ) -> Stream:
        """Like `chat`, but yields text as it is generated."""
        tokens = self.chat_tokens(messages, chat_template_kwargs)
        return self.stream(tokens, max_tokens, sampling=sampling, **options)

    def chat_tokens(self, messages: list[Message], chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """The tokens of `messages`, rendered with the model's chat template."""
        return ask.chat_tokens(self.name, self.tokenizer, messages, chat_template_kwargs)

    def unpin(self, prompt: Prompt, salt: str = "") -> None:
        """Allow the blocks of a prompt that was pinned with `pin=True` to be evicted again."""
        self.engine.prefix.unpin(ask.encode(prompt, self.tokenizer), salt)

    def probe(self, prompt: Prompt, salt: str = "") -> Probe:
        """How much of a prompt is cached now; changes nothing."""
        tokens = ask.encode(prompt, self.tokenizer)
        return Probe(len(tokens), *self.engine.prefix.probe(tokens, salt))

    def clear_cache(self) -> Freed:
        """Drop all cached conversations of this model that are neither running nor pinned, including those on disk."""
        before = self.engine.memory.stats().pools
        self.engine.clear_cache()
        after = self.engine.memory.stats().pools
        blocks = [now.free - then.free for now, then in zip(after, before, strict=True)]
        return Freed(sum(blocks), sum(n * pool.block_bytes for n, pool in zip(blocks, before, strict=True)))

    def stats(self) -> Stats:
        """Figures of the pools, the prefix cache, tiers, speculation and memory."""
        return read_stats(self.engine)

    def check_integrity(self) -> None:
        """Raises IntegrityError if any block is lost, held twice or miscounted."""
        self.engine.check_integrity()

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary: token ids are below it."""
        return self.plan.layout.vocabulary

    @property
    def longest(self) -> int:
        """The maximum number of tokens of a request, prompt and answer together."""
        # With `max_kv_size` the model never sees more than that at once.
        unlimited = self.context is None or self.settings.max_kv_size is not None
        return self.plan.longest if unlimited else min(self.plan.longest, self.context or 0)

    def close(self) -> None:
        """Release the pool; what is cached is written to the disk cache if there is one, and otherwise lost.

        The LLM cannot be used afterwards. Closing twice is allowed.
        """
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._driver is None:
            return f"LLM({self.name}, closed)"
        size, longest = format_size(self.plan.pool_bytes), self.plan.longest
        holds = f" for {longest:,} tokens" if longest < 2**62 else ""
        return f"LLM({self.name}, KV pool {size}{holds}, {self.plan.max_batch} at a time, on {self.plan.device.name})"

    # What makes requests of calls, also for AsyncLLM: in any thread, the engine is not touched.

    def requests(
        self,
        prompt: Prompt | list[Prompt],
        max_tokens: int | None,
        sampling: Sampling | Sequence[Sampling] | None,
        options: dict[str, Any],
    ) -> tuple[list[Request], bool]:
        """A request for each prompt, and whether a list was given. Raises if one can never be served."""
        prompts, many = ask.prompts_of(prompt)
        asked = ask.options_of(len(prompts), max_tokens, sampling, options)
        requests = []
        for each, wanted in zip(prompts, asked, strict=True):
            wanted.sampling.check_ids(self.vocabulary)
            count = ask.MAX_TOKENS if wanted.sampling.max_tokens is None else wanted.sampling.max_tokens
            tokens = ask.encode(each, self.tokenizer)
            prediction = ask.encode_prediction(wanted.prediction, self.tokenizer)
            requests.append(Request(tokens, count, wanted.sampling, wanted.salt, wanted.pin, prediction=prediction))
        for request in requests:
            self._validate(request)
        return requests, many

    def output(self, request: Request) -> TextOutput:
        """Turns the tokens of a request into text."""
        detokenizer = self.tokenizer.detokenizer if self.tokenizer is not None else None
        hidden = self.stop_tokens.union(request.sampling.stop_token_ids)
        return TextOutput(detokenizer, hidden, request.sampling.stop)

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
