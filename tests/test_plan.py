"""What a model keeps, how a budget is divided, and that what the plan promises is really there."""

import math
import re
from dataclasses import replace

import mlx.core as mx
import pytest

from architectures import VOCAB, build
from onekv.config import Settings
from onekv.errors import MemoryBudgetError, SettingError
from onekv.memory.kv import KVMemory
from onekv.memory.layout import Group, KVLayer, Layout, Leaf, Rule
from onekv.memory.layout.reader import KEEP, read_layout
from onekv.memory.plan import MARGIN, Plan, make_plan
from onekv.memory.plan.budget import divide, least_bytes
from onekv.memory.pool import OutOfBlocks
from onekv.memory.pool.sequence import Sequence
from onekv.memory.pool.table import blocks_needed
from onekv.units import format_size

FLOAT = 4
# Two KV heads of 16, keys and values.
ATTENTION = 2 * (16 + 16) * FLOAT
# Gated delta net: a window of 3 inputs (2 key heads of 32, twice, and 4 value heads of 16), and 4 matrices 16 x 32.
DELTA = (3 * (2 * 2 * 32 + 4 * 16) + 4 * 16 * 32) * FLOAT
# Mamba 2: a window of 3 inputs (4 heads of 16, 2 groups of 32, twice), and 4 matrices 16 x 32.
MAMBA = (3 * (4 * 16 + 2 * 2 * 32) + 4 * 16 * 32) * FLOAT
# Per model: each group's rule, layers and bytes per token; recurrent layers; their bytes per sequence.
LAYOUTS = {
    "llama": ([(Rule(), 2, 2 * ATTENTION)], 0, 0),
    "gemma3_text": ([(Rule(window=32), 2, 2 * ATTENTION), (Rule(), 2, 2 * ATTENTION)], 0, 0),
    "qwen3_next": ([(Rule(), 2, 2 * ATTENTION)], 2, 2 * DELTA),
    "falcon_h1": ([(Rule(), 2, 2 * ATTENTION)], 2, 2 * MAMBA),
    # One latent vector of 32 and one rotary key of 16 for all heads.
    "deepseek_v3": ([(Rule(), 3, 3 * (32 + 16) * FLOAT)], 0, 0),
    "llama4": ([(Rule(chunk=32), 3, 3 * ATTENTION), (Rule(), 1, ATTENTION)], 0, 0),
}


@pytest.fixture(autouse=True)
def _plain_kernels():
    """MLX on CPU compiles fused kernels with g++; for these small models that takes longer than the tests."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def plan_for(name: str, **settings) -> Plan:
    return make_plan(build(name), Settings(**{"block_size": 16, "prefill_chunk": 48, **settings}), None)


def group_bytes(layout: Layout, blocks: tuple[int, ...], block_size: int) -> int:
    return sum(group.token_bytes * block_size * count for group, count in zip(layout.groups, blocks, strict=True))


# Layout


@pytest.mark.parametrize("name", LAYOUTS)
def test_groups_and_bytes_are_read_from_the_model(name):
    layout = read_layout(build(name))
    groups, states, sequence_bytes = LAYOUTS[name]
    assert [(group.rule, len(group.layers), group.token_bytes) for group in layout.groups] == groups
    assert (len(layout.states), layout.sequence_bytes) == (states, sequence_bytes)
    assert layout.vocabulary == VOCAB
    assert layout.query_heads == 4


def test_latent_attention_keeps_one_head_with_keys_and_values_of_different_width():
    layer = read_layout(build("deepseek_v3")).groups[0].layers[0]
    assert layer == KVLayer("layer 0", heads=1, k_dim=32, v_dim=16, dtype=mx.float32)


def test_a_composite_layer_keeps_both_parts():
    layout = read_layout(build("falcon_h1"))
    assert layout.structure == ((Leaf(-1, 0), Leaf(0, 0)), (Leaf(-1, 1), Leaf(0, 1)))
    assert [state.name for state in layout.states] == ["layer 0.0", "layer 1.0"]
    assert [layer.name for layer in layout.groups[0].layers] == ["layer 0.1", "layer 1.1"]


def test_recurrent_and_attention_layers_keep_their_order():
    assert read_layout(build("qwen3_next")).structure == (Leaf(-1, 0), Leaf(0, 0), Leaf(-1, 1), Leaf(0, 1))


def test_bytes_follow_the_dtype_of_the_weights():
    model = build("llama")
    model.set_dtype(mx.bfloat16)
    assert read_layout(model).groups[0].token_bytes == ATTENTION


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_max_kv_size_changes_full_attention_alone(name):
    before, after = read_layout(build(name)), read_layout(build(name), max_kv_size=50)
    for old, new in zip(before.groups, after.groups, strict=True):
        full = old.rule == Rule()
        assert new.rule == (Rule(window=50 - KEEP, keep=KEEP, ring=True) if full else old.rule)
        assert new.layers == old.layers


@pytest.mark.parametrize("size", [1, 4])
def test_max_kv_size_must_leave_room_beside_the_first_tokens(size):
    with pytest.raises(SettingError, match=rf"--max-kv-size is {size}; it must be more than 4"):
        plan_for("llama", max_kv_size=size)
    assert plan_for("llama", max_kv_size=5).layout.groups[0].rule.window == 1


# Dividing the budget


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("budget", [2**17, 300_000, 10**6, 2**24, 10**9 + 7])
@pytest.mark.parametrize("max_batch", [1, 4])
@pytest.mark.parametrize(("block_size", "chunk"), [(16, 48), (64, 512), (7, 3)])
def test_a_division_stays_within_the_budget_and_serves_one_sequence(name, budget, max_batch, block_size, chunk):
    layout = read_layout(build(name))
    states = layout.sequence_bytes * max_batch
    try:
        blocks = divide(layout, budget, block_size, max_batch, chunk)
    except MemoryBudgetError:
        least = [blocks_needed(g.rule, block_size, 2**62 if g.rule.span else 1, chunk) for g in layout.groups]
        assert states + group_bytes(layout, tuple(least), block_size) > budget
        return
    assert states + group_bytes(layout, blocks, block_size) <= budget
    for group, count in zip(layout.groups, blocks, strict=True):
        assert count >= blocks_needed(group.rule, block_size, 2**62 if group.rule.span else 1, chunk)


def test_all_of_a_full_attention_budget_is_used():
    layout = read_layout(build("llama"))
    block = layout.groups[0].token_bytes * 16
    assert divide(layout, 100 * block, 16, 1, 48) == (100,)
    assert divide(layout, 101 * block - 1, 16, 1, 48) == (100,)


def test_windows_take_what_max_batch_needs_and_full_attention_the_rest():
    layout = read_layout(build("gemma3_text"))
    blocks = divide(layout, 2**24, 16, 4, 48)
    first, further = (blocks_needed(Rule(window=32), 16, 2**62, chunk) for chunk in (48, 1))
    assert blocks[0] >= first + 3 * further
    assert blocks[1] >= blocks[0]
    assert group_bytes(layout, blocks, 16) > 2**24 - 16 * 16 * sum(group.token_bytes for group in layout.groups)


def test_recurrent_states_are_paid_from_the_same_budget():
    layout = read_layout(build("qwen3_next"))
    block = layout.groups[0].token_bytes * 16
    budget = 8 * layout.sequence_bytes + 3 * block
    assert divide(layout, budget, 16, 8, 48) == (3,)
    assert divide(layout, budget, 16, 1, 48)[0] > 3


@pytest.mark.parametrize("window", [100, 4096])
@pytest.mark.parametrize("block_size", [16, 64])
def test_a_window_of_any_size_holds_one_sequence(window, block_size):
    """Also where the number of blocks is rounded."""
    group = Group(Rule(window=window), (KVLayer("layer 0", 2, 16, 16, mx.float32),))
    layout = Layout((group,), (), (Leaf(0, 0),), VOCAB, 4)
    needed = blocks_needed(group.rule, block_size, 2**62, 512)
    assert divide(layout, needed * block_size * group.token_bytes, block_size, 1, 512)[0] >= needed


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_too_small_a_budget_names_the_flag_and_both_sizes(name):
    layout = read_layout(build(name))
    least = [blocks_needed(g.rule, 16, 2**62 if g.rule.span else 1, 48) for g in layout.groups]
    needed = 4 * layout.sequence_bytes + group_bytes(layout, tuple(least), 16)
    divide(layout, needed, 16, 4, 48)
    with pytest.raises(MemoryBudgetError) as caught:
        divide(layout, needed - 1, 16, 4, 48)
    text = str(caught.value)
    assert f"--kv-memory is {format_size(needed - 1)}" in text
    assert f"at least {format_size(needed)}" in text
    assert "raise --kv-memory" in text


# The plan


@pytest.mark.parametrize("name", LAYOUTS)
def test_pool_arrays_are_exactly_as_large_as_planned(name):
    plan = plan_for(name, kv_memory="2MB", max_batch=3)
    memory = KVMemory(plan.layout, plan.blocks, plan.block_size, plan.prefill_chunk)
    arrays = [array for pool in memory.pools for layer in pool.layers for array in (layer.k, layer.v)]
    assert sum(array.nbytes for array in arrays) == plan.pool_bytes
    assert sum(pool.nbytes for pool in memory.pools) == plan.pool_bytes
    assert plan.pool_bytes + plan.state_bytes <= plan.budget == 2_000_000


def test_a_share_is_of_what_is_free():
    half, quarter = (plan_for("llama", kv_memory=text).budget for text in ("0.50%", "0.25%"))
    assert half == pytest.approx(2 * quarter, rel=0.1)


@pytest.mark.parametrize("kv_memory", [None, "25%"])
def test_without_a_number_for_kv_weights_that_do_not_fit_are_refused_for_their_own_size(kv_memory):
    """Nobody has set --kv-memory to 0 bytes."""
    model, settings = build("qwen3_next"), Settings(kv_memory=kv_memory, block_size=16)
    plan = make_plan(model, settings, 256, available=2**20)
    least = least_bytes(plan.layout, 16, plan.max_batch, plan.prefill_chunk)
    assert plan.budget == least and plan.longest == 16
    with pytest.raises(MemoryBudgetError) as caught:
        plan.check()
    assert f"weights {format_size(plan.weights)}" in str(caught.value) and "1.00 MiB of" in str(caught.value)


def test_the_least_budget_that_a_refusal_names_is_enough():
    """Also where snapshots of recurrent states share it."""
    with pytest.raises(MemoryBudgetError) as caught:
        plan_for("qwen3_next", kv_memory="64KiB")
    size = float(re.search(r"at least (\d+\.\d+) KiB", str(caught.value))[1])
    assert plan_for("qwen3_next", kv_memory=math.ceil((size + 0.01) * 2**10)).blocks


def test_the_default_budget_is_no_more_than_full_conversations_need():
    plan = make_plan(build("llama"), Settings(block_size=16, max_batch=2), 256)
    assert plan.budget == 2 * 256 * plan.layout.groups[0].token_bytes
    assert plan.conversations(256) == 2


def test_a_plan_that_fits_is_accepted_and_one_byte_less_is_refused():
    plan = plan_for("llama", kv_memory="2MB")
    replace(plan, device=replace(plan.device, available=plan.total)).check()
    with pytest.raises(MemoryBudgetError) as caught:
        replace(plan, device=replace(plan.device, available=plan.total - 1)).check()
    text = str(caught.value)
    for part in (plan.total, plan.weights, plan.pool_bytes, plan.workspace, MARGIN, plan.total - 1, plan.budget):
        assert format_size(part) in text
    assert "lower --kv-memory" in text


def test_total_is_the_sum_of_its_parts():
    plan = plan_for("falcon_h1", kv_memory="2MB", max_batch=3)
    assert plan.state_bytes >= 3 * 2 * MAMBA
    assert plan.total == plan.weights + plan.pool_bytes + plan.state_bytes + plan.workspace + MARGIN


def fill(memory: KVMemory, length: int) -> Sequence:
    """A sequence that grows to `length` tokens as the engine does it: chunks, then the last token by itself."""
    sequence = memory.open(length)
    while sequence.length < length - 1:
        count = min(memory.chunk, length - 1 - sequence.length)
        sequence.advance(count)
        sequence.length += count
    sequence.prefilled()
    sequence.advance(1)
    sequence.length += 1
    return sequence


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("length", "max_kv_size"),
    [(10, None), (100, None), (500, None)] + [(length, 70) for length in (100, 500)],
)
def test_as_many_conversations_as_the_plan_says_can_be_opened(name, length, max_kv_size):
    plan = plan_for(name, kv_memory="1500kB", max_batch=20, max_kv_size=max_kv_size)
    memory = KVMemory(plan.layout, plan.blocks, plan.block_size, plan.prefill_chunk)
    promised = plan.conversations(length)
    assert promised > 0
    sequences = [fill(memory, length) for _ in range(promised)]
    # A ring that is full needs less than one that still grows, so there may be room for more than promised.
    if promised < plan.max_batch and max_kv_size is None:
        with pytest.raises(OutOfBlocks):
            memory.open(length)
    memory.check_integrity()
    for sequence in sequences:
        memory.close(sequence)
    memory.check_integrity()


def test_longer_than_the_pool_is_no_conversation():
    plan = plan_for("llama", kv_memory="1MB")
    assert plan.conversations(plan.longest) == 1
    assert plan.conversations(plan.longest + 1) == 0
