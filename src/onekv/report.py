"""Human-readable output: the plan, and the demo."""

import sys
from dataclasses import replace

import mlx.core as mx
from mlx.nn.layers.base import Module

from .config import Settings
from .errors import MemoryBudgetError, UnsupportedLayerError
from .llm import LLM, Completion, Message
from .memory.formats import compared, parse
from .memory.layout.stored import encoded
from .memory.plan import MARGIN, Plan, make_plan
from .memory.plan.budget import divide
from .models import context_length, load_for
from .models.adapted import adapter_bytes
from .models.draft import WithDraft
from .tables import table
from .tiers.remote.opening import check as check_remote
from .units import format_size


def print_plan(name: str, settings: Settings) -> int:
    """Print the plan for a model; 1 if it does not fit."""
    title, model, context, plan = plan_of(name, settings)
    print(f"{title} on {plan.device.name}\n")
    print(plan_table(plan, context if settings.max_kv_size is None else None, adapter_bytes(model)))
    print("\n" + _formats_table(plan, settings))
    try:
        plan.check()
    except MemoryBudgetError as error:
        print(f"\nonekv: it does not fit: {error}", file=sys.stderr)
        return 1
    return 0


def plan_of(name: str, settings: Settings) -> tuple[str, Module, int | None, Plan]:
    """What a model is called, with its draft model; the model, without its weights; its context; and its plan."""
    check_remote(settings)
    loaded = load_for(name, settings, adapter=settings.adapter, lazy=True)
    context, title, model = context_length(loaded.config), loaded.name, loaded.model
    if settings.draft_model is not None:
        draft = load_for(settings.draft_model, settings, lazy=True)
        title, model = f"{loaded.name} with {draft.name} as its draft model,", WithDraft(model, draft.model)
    return title, model, context, make_plan(model, settings, context)


def plan_table(plan: Plan, context: int | None, adapter: int = 0) -> str:
    """Where the bytes go, and how many conversations that is, up to the longest that the model takes.

    Of its weights, this many bytes may be an `adapter`'s.
    """
    return "\n\n".join((_bytes_table(plan, adapter), _groups_table(plan), _lengths_table(plan, context)))


def _bytes_table(plan: Plan, adapter: int) -> str:
    rows = [
        ["weights", format_size(plan.weights - adapter)],
        *([["adapter", format_size(adapter)]] if adapter else []),
        ["KV pool", format_size(plan.pool_bytes)],
        ["recurrent states", format_size(plan.state_bytes)],
        ["workspace of a step", format_size(plan.workspace)],
        *([["in flight to and from disk", format_size(plan.disk_staging)]] if plan.disk_staging else []),
        *([["in flight to and from the store", format_size(plan.remote_staging)]] if plan.remote_staging else []),
        ["margin", format_size(MARGIN)],
        ["total", format_size(plan.total)],
        ["available", format_size(plan.device.available)],
    ]
    return table(rows, ["memory", "size"])


def _groups_table(plan: Plan) -> str:
    rows = [
        [
            str(group.rule),
            str(len(group.layers)),
            format_size(group.token_bytes),
            f"{blocks:,}",
            f"{blocks * plan.block_size:,}",
        ]
        for group, blocks in zip(plan.layout.groups, plan.blocks, strict=True)
    ]
    if plan.layout.states:
        size = format_size(plan.layout.sequence_bytes)
        rows.append(["recurrent", str(len(plan.layout.states)), f"{size} a conversation", "", ""])
    return table(rows, ["layers that keep", "layers", "per token", "blocks", "tokens"])


def _lengths_table(plan: Plan, context: int | None) -> str:
    lengths = [1024, 4096, 8192, 16384, 32768, 131072]
    if context is not None:
        lengths = [*(length for length in lengths if length < context), context]
    rows = [[f"{length:,} tokens", str(plan.conversations(length))] for length in lengths]
    return table(rows, ["conversations of", f"at once (of {plan.max_batch})"])


def _formats_table(plan: Plan, settings: Settings) -> str:
    """What the same budget holds in each format."""
    chosen = str(parse(settings.kv_format))
    shown_formats = [*compared()]
    if chosen not in [str(parse(name)) for name in shown_formats]:
        shown_formats.append(chosen)
    rows = []
    for name in shown_formats:
        shown = f"{name} (this plan)" if str(parse(name)) == chosen else name
        try:
            layout = encoded(plan.layout, parse(name), settings.kv_plain_layers)
            blocks = divide(
                layout, plan.budget, plan.block_size, plan.max_batch, plan.prefill_chunk, plan.snapshot_bytes
            )
        except UnsupportedLayerError:
            rows.append([shown, "not for this model", ""])
        except MemoryBudgetError:
            rows.append([shown, "does not fit", ""])
        else:
            size = sum(group.token_bytes for group in layout.groups)
            longest = replace(plan, layout=layout, blocks=blocks).longest
            rows.append([shown, format_size(size), f"{longest:,}" if longest < 2**62 else "no limit"])
    return table(rows, ["--kv-format", "per token", "tokens"])


QUESTIONS = (
    "In one sentence: why is the sky blue?",
    "And why is it red in the evening?",
    "Write a haiku about that.",
)


def demo() -> None:
    """Three turns of a conversation with the default model, with speed and memory of each."""
    with LLM(kv_memory="256MiB") as llm:
        messages: list[Message] = []
        rows = []
        for turn, question in enumerate(QUESTIONS, 1):
            print(f"> {question}")
            messages.append({"role": "user", "content": question})
            mx.reset_peak_memory()
            stream = llm.stream_chat(messages, max_tokens=96)
            for piece in stream:
                print(piece, end="", flush=True)
            print("\n")
            messages.append({"role": "assistant", "content": stream.completion.text})
            rows.append([str(turn), *_turn(llm, stream.completion)])
        header = [
            "turn",
            "prompt",
            "generated",
            "prompt tok/s",
            "decode tok/s",
            "weights",
            "KV pool",
            "peak",
        ]
        print(table(rows, header))
        llm.check_integrity()
    print("\nNext: `onekv serve` (`make serve` in a checkout), then open http://127.0.0.1:8000/ in a browser.")


def _turn(llm: LLM, completion: Completion) -> list[str]:
    memory, timings = llm.stats().memory, completion.timings
    generated = len(completion.tokens)
    return [
        str(completion.prompt_tokens),
        str(generated),
        f"{completion.prompt_tokens / timings.prefill:.1f}",
        f"{(generated - 1) / timings.decode:.1f}" if generated > 1 else "-",
        format_size(memory.weights),
        format_size(memory.pool),
        format_size(memory.peak),
    ]
