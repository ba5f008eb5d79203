"""What a model needs, from the shapes of its weights alone, as `onekv plan` finds it; and the budget for all."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ...errors import MemoryBudgetError, ModelFormatError, SettingError
from ...memory.plan import MARGIN, Plan, make_plan
from ...memory.plan.device import read_device
from ...memory.plan.workspace import weight_bytes
from ...models import context_length, load_for
from ...models.adapted import adapter_bytes
from ...models.draft import WithDraft
from ...units import format_size, parse_size
from ..infill import marks_of
from ..sampling_defaults import SamplingDefaults
from .spec import ModelSpec


@dataclass(frozen=True)
class Planned:
    plan: Plan
    # Bytes of its weights that it shares with other adapters of the base, and of its own adapter.
    shared: int
    adapter: int
    # Bytes that it would need with the smallest KV there can be.
    least: int
    # The file or folder it is from, what its config.json says, and its chat template.
    path: Path
    config: dict[str, Any]
    template: str
    chats: bool
    thinks: bool
    inserts: bool
    # The most tokens the model was made for, where that counts, and the most a request may have.
    context: int | None
    longest: int
    defaults: SamplingDefaults
    # Kept while the model is unloaded: it is small compared with the weights, and loading it again takes long.
    tokenizer: TokenizerWrapper

    @property
    def need(self) -> int:
        """Bytes that it takes while it is loaded; the margin is the process's, whatever is loaded."""
        return self.plan.total - MARGIN

    @property
    def own(self) -> int:
        """Those that it does not share with a model of the same weights."""
        return self.need - self.shared


def budget(memory: str | int | None) -> int:
    """Bytes for all models: what is free now, a share of it, or what is given.

    Raises MemoryBudgetError if the device does not have them.
    """
    device = read_device()
    if memory is None:
        return device.available
    size = parse_size(memory, whole=device.available, name="--memory")
    if size > device.total:
        raise MemoryBudgetError(
            f"--memory is {format_size(size)}, but {device.name} has {format_size(device.total)}; lower it"
        )
    return size


def plan_model(spec: ModelSpec, memory: int, tokenizer: TokenizerWrapper | None = None) -> Planned:
    """The plan for a model in a budget of `memory` bytes; its `tokenizer`, where another of the same weights has it.

    Raises what finding it raises.

    Where its settings do not say how many bytes its KV may take, or say it as a share, that is of what its weights
    leave of all of `memory`. The plan of a model that does not fit into that says how much it needs at least.
    """
    settings, served = spec.engine, spec.served
    try:
        loaded = load_for(spec.model, settings, adapter=settings.adapter, tokenizer=tokenizer, lazy=True)
    except (SettingError, ModelFormatError) as error:
        if settings.adapter is None:
            raise
        # Which of several it is.
        raise type(error)(f"models.{spec.name}: {error}") from error
    module = loaded.model
    adapter_size = adapter_bytes(module)
    shared = weight_bytes(module) - adapter_size
    if settings.draft_model is not None:
        module = WithDraft(module, load_for(settings.draft_model, settings, lazy=True).model)
    context = context_length(loaded.config)
    try:
        plan = make_plan(module, settings, context, available=memory)
        smallest = make_plan(module, replace(settings, kv_memory=None), context, available=0)
    except MemoryBudgetError as error:
        raise MemoryBudgetError(f"models.{spec.name}: {error}") from error
    # With `max_kv_size` the model never sees more than that at once.
    limit = context if settings.max_kv_size is None else None
    template, own = served.template(), loaded.tokenizer.chat_template
    return Planned(
        plan=plan,
        shared=shared,
        adapter=adapter_size,
        least=smallest.total - MARGIN,
        path=loaded.path,
        config=loaded.config,
        template=template or (own if isinstance(own, str) else ""),
        chats=template is not None or bool(loaded.tokenizer.has_chat_template),
        thinks=bool(loaded.tokenizer.has_thinking),
        inserts=marks_of(loaded.tokenizer) is not None,
        context=limit,
        longest=plan.longest if limit is None else min(plan.longest, limit),
        defaults=SamplingDefaults.of(served, loaded.path),
        tokenizer=loaded.tokenizer,
    )
