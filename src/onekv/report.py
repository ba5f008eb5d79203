"""Tables for people: the plan, and the demonstration."""

import sys
from dataclasses import replace

import mlx.core as mx

from .config import Settings
from .errors import MemoryBudgetError, UnsupportedLayerError
from .llm import LLM, Completion, Message
from .memory.formats import names, parse
from .memory.layout.stored import encoded
from .memory.plan import MARGIN, Plan, make_plan
from .memory.plan.budget import divide
from .models import context_length, load_model
from .units import format_size


def table(rows: list[list[str]], header: list[str]) -> str:
    """Columns as wide as their widest cell; the first is aligned left, the others right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [header, ["-" * width for width in widths], *rows]
    )


def print_plan(name: str, settings: Settings) -> int:
    """Print the plan for a model; 1 if it does not fit."""
    loaded = load_model(name, dtype=settings.dtype, lazy=True)
    plan = make_plan(loaded.model, settings, context_length(loaded.config))
    print(f"{loaded.name} on {plan.device.name}\n")
    print(plan_table(plan))
    print("\n" + _formats_table(plan, settings))
    try:
        plan.check()
    except MemoryBudgetError as error:
        print(f"\nonekv: it does not fit: {error}", file=sys.stderr)
        return 1
    return 0


def plan_table(plan: Plan) -> str:
    return "\n\n".join((_bytes_table(plan), _groups_table(plan), _lengths_table(plan)))


def _bytes_table(plan: Plan) -> str:
    rows = [
        ["weights", format_size(plan.weights)],
        ["KV pool", format_size(plan.pool_bytes)],
        ["recurrent states", format_size(plan.state_bytes)],
        ["workspace of a step", format_size(plan.workspace)],
        *([["on the way to and from disk", format_size(plan.staging)]] if plan.staging else []),
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


def _lengths_table(plan: Plan) -> str:
    lengths = [1024, 4096, 8192, 16384, 32768, 131072]
    rows = [[f"{length:,} tokens", str(plan.conversations(length))] for length in lengths]
    return table(rows, ["conversations of", f"at once (of {plan.max_batch})"])


def _formats_table(plan: Plan, settings: Settings) -> str:
    """What the same budget holds in each format."""
    chosen = str(parse(settings.kv_format))
    compared = [*names(), "k8v4"]
    if chosen not in [str(parse(name)) for name in compared]:
        compared.append(chosen)
    rows = []
    for name in compared:
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
