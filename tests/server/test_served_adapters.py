"""A base and its adapters behind one server: models of their own, over weights that are in memory once."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import ollama
import openai
import pytest
from several import TWO, WORDS, cached, complete, rows, start_several, states, text
from swaps import COMMON, LEFT, active, generate, spec
from test_server import onekv
from test_stuck import eventually

from adapters import greedy, save_adapter, stock_model
from conftest import Server, stop_server
from onekv.bench.soak import save_tiny
from onekv.errors import MemoryBudgetError, ModelFormatError
from onekv.memory.plan import MARGIN
from onekv.models import DEFAULT_MODEL, load_model
from onekv.models.reading import read
from onekv.server.models.registry import Models
from onekv.server.models.spec import ModelSpec
from onekv.units import format_size


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    base = save_tiny(folder / "base", 0)
    adapters = {name: save_adapter(folder / name, base, seed) for seed, name in enumerate(("one", "two"))}
    return {"base": base, **adapters}


def answer(base: str, adapter: str | None, count: int = 8) -> str:
    """By stock mlx-lm."""
    tokenizer = load_model(DEFAULT_MODEL, lazy=True).tokenizer
    return tokenizer.decode(greedy(stock_model(base, adapter), tokenizer.encode(WORDS), count)[0]).strip()


@pytest.fixture(scope="module")
def stock(paths: dict[str, str]) -> dict[str, str]:
    found = {name: answer(paths["base"], None if name == "base" else paths[name]) for name in paths}
    assert len(set(found.values())) == 3, "else a wrong model would not be seen"
    return found


def tables(paths: dict[str, str]) -> dict[str, dict[str, Any]]:
    adapters = {name: {"base": "base", "adapter": paths[name]} for name in ("one", "two")}
    return {"base": {"model": paths["base"]}, **adapters}


def specs(paths: dict[str, str], **keep: str) -> list[ModelSpec]:
    made = [spec("base", paths["base"], keep.get("base", "lru"))]
    return made + [spec(name, paths["base"], keep.get(name, "lru"), adapter=paths[name]) for name in ("one", "two")]


def test_each_answers_as_stock_mlx_lm(
    paths: dict[str, str], stock: dict[str, str], running: list[Server], tmp_path: Path
) -> None:
    server = start_several(tmp_path, tables(paths), memory="1600MiB")
    running.append(server)
    found: dict[str, str] = {}
    # All three at the same time, each in the thread of its engine.
    asking = [
        threading.Thread(target=lambda name=name: found.update({name: text(complete(server, name))})) for name in paths
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert found == stock and set(states(server).values()) == {"loaded"}
    listed = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none").models.list().data
    assert {model.id: model.model_extra["base"] for model in listed} == {"base": None, "one": "base", "two": "base"}
    tags = ollama.Client(host=server.url).list().models
    assert len({each.digest for each in tags}) == 3 and len({each.size for each in tags}) == 2
    shown = {each.model: each.details.parent_model for each in tags if each.details is not None}
    assert shown == {"base": "", "one": "base", "two": "base"}
    bytes_of = {name: row["bytes"] for name, row in rows(server).items()}
    shared = bytes_of["base"]["weights"]
    assert {each["shared"] for each in bytes_of.values()} == {shared}
    counted = httpx.get(f"{server.url}/admin/models").json()["memory"]["counted"]
    assert counted == sum(each["total"] for each in bytes_of.values()) - 2 * shared + MARGIN
    assert "beside base" in server.log()


def test_conversations_never_mix_over_a_restart(paths: dict[str, str], stock: dict[str, str], tmp_path: Path) -> None:
    """Nor where the adapter's file is changed in place."""
    disk = ["--disk-cache", str(tmp_path / "disk"), "--disk-limit", "300MB"]
    adapter = tmp_path / "one"
    save_adapter(adapter, paths["base"], 0)
    wanted = tables({**paths, "one": str(adapter)})
    expected = dict(stock)
    for again in (False, True):
        if again:
            save_adapter(adapter, paths["base"], 9)
            expected["one"] = answer(paths["base"], str(adapter))
            assert expected["one"] != stock["one"]
        server = start_several(tmp_path, wanted, *disk, memory="1600MiB")
        for name in paths:
            done = complete(server, name)
            assert text(done) == expected[name]
            assert (cached(done) > 0) is (again and name != "one"), (again, name)
        said = stop_server(server)
        assert server.process.returncode == 0 and "Traceback" not in said, said


def test_weights_are_there_until_the_last_is_unloaded(paths: dict[str, str]) -> None:
    models = Models(specs(paths), "4GiB", COMMON)
    base, one, two = models.models
    before = active()
    models.start()
    try:
        shared = base.planned.shared
        assert shared == one.planned.shared == base.planned.plan.weights and base.planned.adapter == 0
        assert one.planned.adapter == one.planned.plan.weights - shared > 0
        taken = {base: active() - before}
        counted = models.counted
        assert counted == base.planned.need + MARGIN
        for model in (one, two):
            had = active()
            generate(models, model)
            taken[model] = active() - had
            plan = model.backend.llm.plan  # type: ignore[union-attr]
            # The pool and the adapter, a buffer that weights are unpacked into, and no weights.
            assert plan.pool_bytes + model.planned.adapter <= taken[model] < plan.pool_bytes + shared // 2
            counted += model.planned.own
            assert models.counted == counted and plan.total == model.planned.plan.total
        # The base goes first: its weights stay, and are counted.
        models.unload(base)
        assert models.counted == counted - base.planned.own
        assert active() - before >= shared + one.planned.plan.pool_bytes * 2
        generate(models, two)
        generate(models, base)
        assert models.counted == counted
        for model in (two, base):
            models.unload(model)
        assert models.counted == one.planned.need + MARGIN
        models.unload(one)
        assert models.counted == MARGIN and active() - before <= LEFT < shared
    finally:
        models.stop(0)


def test_adapters_fit_where_whole_models_do_not(paths: dict[str, str]) -> None:
    """Never more than --memory: what is shared is counted once, and who does not fit makes others go."""
    models = Models(specs(paths, base="pinned"), "4GiB", COMMON)
    base, one, two = models.models
    models.start()
    try:
        models.memory = base.planned.need + one.planned.own + MARGIN
        generate(models, one)
        assert models.counted == models.memory and one.state == "loaded"
        generate(models, two)
        assert (base.state, one.state, two.state) == ("loaded", "unloaded", "loaded")
        assert models.counted <= models.memory
        models.memory -= 1
        with pytest.raises(MemoryBudgetError, match="beside what is pinned") as refused:
            models.ask(one)
        assert f"(weights {format_size(one.planned.adapter)}," in str(refused.value)
    finally:
        models.stop(0)


def test_weights_stay_where_base_and_adapter_never_fit_together(paths: dict[str, str]) -> None:
    models = Models(specs(paths)[:2], "4GiB", COMMON)
    base, one = models.models
    before = active()
    models.start()
    try:
        models.memory = one.planned.need + MARGIN
        had = read.bytes
        for model in (one, base, one):
            generate(models, model)
            assert [each.state for each in models.models if each is not model] == ["unloaded"]
            assert models.counted == model.planned.need + MARGIN
        # The adapters alone.
        assert read.bytes - had < base.planned.shared // 2
        models.unload(one)
        assert models.counted == MARGIN and active() - before <= LEFT
    finally:
        models.stop(0)


def test_weights_go_when_nobody_waits_for_them_any_more(paths: dict[str, str]) -> None:
    """An adapter is waited for that fits when two others are gone, of which one still answers."""
    others = [spec("x", paths["base"], dtype="float16"), spec("one", paths["base"], adapter=paths["one"])]
    models = Models([specs(paths)[0], *others], "4GiB", COMMON)
    base, x, one = models.models
    models.start()
    try:
        held = models.ask(x)
        held.came.result(60)
        models.memory = base.planned.need + x.planned.need + MARGIN
        plan = one.planned.plan
        one.planned = replace(one.planned, plan=replace(plan, workspace=plan.workspace + models.memory - plan.total))
        waiting = models.ask(one)
        assert eventually(lambda: base.state == "unloaded")
        assert x.state == "unloading" and models.counted == x.planned.need + base.planned.shared + MARGIN
        taken = active()
        models.leave(waiting)
        assert eventually(lambda: models.counted == x.planned.need + MARGIN)
        assert eventually(lambda: taken - active() >= base.planned.shared)
        models.leave(held)
    finally:
        models.stop(0)


def test_an_adapter_that_fails_leaves_the_base(paths: dict[str, str], tmp_path: Path) -> None:
    adapter = tmp_path / "broken"
    save_adapter(adapter, paths["base"], 0)
    models = Models([spec("base", paths["base"]), spec("broken", paths["base"], adapter=str(adapter))], "4GiB", COMMON)
    models.start()
    try:
        generate(models, models.first)
        before, counted = active(), models.counted
        file = adapter / "adapters.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-8])
        place = models.ask(models.models[1])
        with pytest.raises(ModelFormatError, match="truncated"):
            place.came.result(60)
        models.leave(place)
        assert abs(active() - before) <= LEFT // 8 and models.counted == counted
        file.write_bytes(whole)
        generate(models, models.models[1])
        generate(models, models.first)
    finally:
        models.stop(0)


def test_what_is_wrong_shows_at_the_start(paths: dict[str, str], tmp_path: Path) -> None:
    config = tmp_path / "onekv.toml"
    table = f'[models.base]\nmodel = {json.dumps(paths["base"])}\n[models.sql]\nbase = "base"\nadapter = "{tmp_path}"\n'
    config.write_text(f'memory = "{TWO}"\nkv_memory = "32MiB"\nhot_only = true\n{table}')
    ended = onekv("serve", "--config", str(config), "--port", "0")
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert "models.sql: --adapter is" in ended.stderr and "has no adapter_config.json" in ended.stderr


def test_one_model_with_an_adapter(paths: dict[str, str], stock: dict[str, str]) -> None:
    """The plan shows its bytes."""
    flags = [paths["base"], "--adapter", paths["one"], "--kv-memory", "32MiB"]
    plan = onekv("plan", *flags)
    assert plan.returncode == 0 and "base+one on" in plan.stdout
    assert any(line.startswith("adapter ") and line.endswith("KiB") for line in plan.stdout.splitlines()), plan.stdout
    done = onekv("generate", WORDS, "--model", *flags, "--max-tokens", "8")
    assert done.stdout.strip() == stock["one"]
