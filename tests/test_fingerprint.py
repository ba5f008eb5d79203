"""The fingerprint of a plan: all that decides the bytes of stored blocks changes it, and nothing else."""

import json
from dataclasses import replace

import mlx.core as mx
import pytest

from onekv.config import Settings
from onekv.memory.formats import parse
from onekv.memory.formats.centre import Centre, Rope
from onekv.memory.layout import Group, KVLayer, Layout, Leaf, Rule, StateLayer
from onekv.memory.layout.fingerprint import stored_as
from onekv.memory.plan import make_plan
from stock import small_llama

LAYER = KVLayer("layer 0", 2, 64, 64, mx.float16, parse("q4"))
STATE = StateLayer("layer 1", (((4, 8), mx.float32), None))
LAYOUT = Layout((Group(Rule(window=100, keep=4), (LAYER,)),), (STATE,), (Leaf(0, 0), Leaf(-1, 0)), 100, 8)


def with_layer(**changes) -> Layout:
    return replace(LAYOUT, groups=(replace(LAYOUT.groups[0], layers=(replace(LAYER, **changes),)),))


def with_rule(**changes) -> Layout:
    return replace(LAYOUT, groups=(replace(LAYOUT.groups[0], rule=replace(LAYOUT.groups[0].rule, **changes)),))


def with_state(**changes) -> Layout:
    return replace(LAYOUT, states=(replace(STATE, **changes),))


def centre(found: str) -> Centre:
    return Centre(mx.zeros((2, 64)), Rope(), found)


OTHERS = {
    "window": with_rule(window=101),
    "no window": with_rule(window=None),
    "keep": with_rule(keep=5),
    "chunk": with_rule(chunk=64),
    "ring": with_rule(ring=True),
    "layer": with_layer(name="layer 2"),
    "heads": with_layer(heads=4),
    "dim of keys": with_layer(k_dim=128),
    "dim of values": with_layer(v_dim=128),
    "dtype": with_layer(dtype=mx.bfloat16),
    "format": with_layer(format=parse("tq4")),
    "format of keys": with_layer(format=parse("k8v4")),
    "format of values": with_layer(format=parse("k4v8")),
    "plain": with_layer(format=parse("auto")),
    "a centre": with_layer(centre=centre("here")),
    "another centre": with_layer(centre=centre("there")),
    "another layer": replace(LAYOUT, groups=(replace(LAYOUT.groups[0], layers=(LAYER, LAYER)),)),
    "another group": replace(LAYOUT, groups=(*LAYOUT.groups, replace(LAYOUT.groups[0], layers=()))),
    "no states": replace(LAYOUT, states=()),
    "state's layer": with_state(name="layer 3"),
    "state's shape": with_state(parts=(((8, 4), mx.float32), None)),
    "state's dtype": with_state(parts=(((4, 8), mx.float16), None)),
    "state's parts": with_state(parts=(None, ((4, 8), mx.float32))),
}


def test_each_field_that_decides_bytes_changes_it():
    found = {name: stored_as(layout, 64) for name, layout in OTHERS.items()}
    found |= {"as it is": stored_as(LAYOUT, 64), "block size": stored_as(LAYOUT, 16)}
    assert len(set(found.values())) == len(found)


def test_it_is_named_fields_alone():
    fields = json.loads(stored_as(LAYOUT, 64))
    assert set(fields) == {"block_size", "groups", "states"}
    assert set(fields["groups"][0]) == {"window", "keep", "chunk", "ring", "layers"}
    layer = {"name": "layer 0", "heads": 2, "k_dim": 64, "v_dim": 64, "dtype": "float16", "centre": None}
    assert fields["groups"][0]["layers"] == [{**layer, "keys": "q4-g64-r1", "values": "q4-g64-r1"}]
    assert fields["states"] == [{"name": "layer 1", "parts": [{"shape": [4, 8], "dtype": "float32"}, None]}]


def test_what_only_a_run_depends_on_does_not_change_it():
    other = replace(LAYOUT, vocabulary=101, query_heads=16, structure=(Leaf(-1, 0), Leaf(0, 0)))
    assert stored_as(other, 64) == stored_as(LAYOUT, 64)


@pytest.mark.parametrize(
    "changed, same",
    [
        ({"max_batch": 5}, True),
        ({"kv_memory": "9MB"}, True),
        ({"prefill_chunk": 7}, True),
        ({"block_size": 32}, False),
        ({"kv_format": "q8"}, False),
        ({"max_kv_size": 64}, False),
    ],
)
def test_of_the_settings_only_those_of_stored_bytes_matter(changed, same):
    model = small_llama(5, num_hidden_layers=2, intermediate_size=64, num_key_value_heads=2, head_dim=64)
    common = {"kv_memory": "8MB", "block_size": 16, "max_batch": 2}
    plans = [make_plan(model, Settings(**{**common, **more}), None) for more in ({}, changed)]
    assert (plans[0].stored_as == plans[1].stored_as) == same
