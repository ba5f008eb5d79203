"""What a model took is given back when it is unloaded, and the plan before it is loaded is the plan when it is."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from several import WORDS
from swaps import COMMON, LEFT, active, generate, spec

from onekv.bench.soak import save_tiny
from onekv.errors import MemoryBudgetError, SettingError
from onekv.llm import LLM
from onekv.memory.plan import MARGIN
from onekv.server.models.registry import Models
from onekv.server.models.spec import ModelSpec
from onekv.units import format_size


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: save_tiny(folder / name, seed) for seed, name in enumerate(("a", "b"))}


def test_unloading_gives_back_weights_and_pool(paths: dict[str, str]) -> None:
    models = Models([spec(name, path) for name, path in paths.items()], "2GiB", COMMON)
    a, b = models.models
    models.start()
    try:
        generate(models, a)
        before, counted = active(), models.counted
        for _ in range(2):
            generate(models, b)
            backend = b.backend
            assert backend is not None
            held = backend.llm.plan.weights + backend.llm.plan.pool_bytes
            assert backend.llm.plan.total == b.planned.plan.total, "the plan was right"
            del backend
            assert active() - before >= held and models.counted == counted + b.planned.need
            models.unload(b)
            assert b.state == "unloaded" and b.backend is None
            assert abs(active() - before) <= LEFT and models.counted == counted
        models.unload(a)
        assert models.counted == MARGIN
    finally:
        models.stop(0)


def test_the_process_gives_it_back_to_the_system(smollm2_path: Path) -> None:
    """In a process of its own: what other tests left behind is given back at moments of its own."""
    command = [sys.executable, str(Path(__file__).with_name("swaps.py")), str(smollm2_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    swaps = json.loads(done.stdout)
    for loaded, left in swaps["footprints"]:
        assert loaded - left >= swaps["weights"]
    # 1 % is what the interpreter needs more to do the same thing twice.
    assert swaps["footprints"][-1][1] <= swaps["footprints"][0][1] * 1.03
    assert swaps["threads"][-1] == swaps["threads"][0], "MLX keeps a thread for each thread that computed"


def test_the_tokenizer_outlives_the_model(paths: dict[str, str]) -> None:
    """Loading it takes longer than a small model's weights, and scatters objects over the interpreter's heap."""
    models = Models([spec("a", paths["a"])], "1GiB", COMMON)
    models.start()
    try:
        for _ in range(2):
            backend = models.backends()["a"]
            assert backend.tokenizer is models.first.planned.tokenizer
            del backend
            models.unload(models.first)
            generate(models, models.first)
    finally:
        models.stop(0)


def test_a_load_that_fails_leaves_nothing(paths: dict[str, str]) -> None:
    models = Models([spec(name, path) for name, path in paths.items()], "2GiB", COMMON)
    broken = Path(paths["b"]) / "generation_config.json"
    models.start()
    try:
        generate(models, models.first)
        before, counted, b = active(), models.counted, models.models[1]
        # It is read when the weights have been loaded.
        broken.write_text('{"temperature": "hot"}')
        place = models.ask(b)
        with pytest.raises(SettingError, match="temperature"):
            place.came.result(60)
        models.leave(place)
        assert b.state == "failed" and "temperature" in str(b.reason)
        assert abs(active() - before) <= LEFT and models.counted == counted
        broken.unlink()
        generate(models, b)
        assert b.state == "loaded" and b.reason is None
    finally:
        models.stop(0)
        broken.unlink(missing_ok=True)


@pytest.mark.parametrize("settings", [{}, {"kv_format": "q4"}, {"kv_memory": "10%"}, {"max_batch": 3}])
def test_the_plan_is_known_before_weights_are_loaded(smollm2_path: Path, settings: dict[str, Any]) -> None:
    models = Models([spec("x", str(smollm2_path), **settings)], "2GiB", COMMON)
    models.start()
    try:
        planned, loaded = models.first.planned.plan, models.backends()["x"].llm.plan
        assert (planned.total, planned.blocks, planned.budget) == (loaded.total, loaded.blocks, loaded.budget)
        assert models.counted == loaded.total <= models.memory
    finally:
        models.stop(0)


def test_what_is_loaded_at_the_start_must_fit(paths: dict[str, str]) -> None:
    before = active()
    pinned = [spec(name, path, keep="pinned") for name, path in paths.items()]
    with pytest.raises(MemoryBudgetError, match=r"beside what is pinned \(b\).*--memory is 800"):
        Models(pinned, "800MiB", COMMON).start()
    with pytest.raises(MemoryBudgetError, match=r"--memory is 1024\.00 TiB, but .* has \d.*; lower it"):
        Models(pinned, "1024TiB", COMMON)
    with pytest.raises(SettingError, match="--memory"):
        Models(pinned, "much", COMMON)
    assert abs(active() - before) <= LEFT


@pytest.mark.parametrize("kv_memory", [None, "25%", "32MiB"])
def test_one_that_never_fits_is_refused_and_the_others_are_served(
    paths: dict[str, str], smollm2_path: Path, kv_memory: str | None
) -> None:
    """Also where nobody said how much KV it gets, and its weights leave nothing."""
    specs = [spec("a", paths["a"]), spec("large", str(smollm2_path), kv_memory=kv_memory)]
    models = Models(specs, "620MiB", COMMON)
    models.start()
    try:
        with pytest.raises(MemoryBudgetError) as caught:
            models.ask(models.models[1])
        said, plan = str(caught.value), models.models[1].planned.plan
        sizes = (plan.weights, plan.pool_bytes, plan.workspace, plan.total, models.memory)
        assert all(format_size(size) in said for size in sizes), said
        assert said.endswith("--memory is 620.00 MiB; raise it"), "no KV is small enough"
        generate(models, models.first)
    finally:
        models.stop(0)


def test_a_refusal_says_what_would_help(paths: dict[str, str]) -> None:
    a, b = (spec(name, path, keep="pinned" if name == "a" else "lru") for name, path in paths.items())

    def refused(memory: str, *specs: ModelSpec) -> str:
        models = Models(list(specs), memory, COMMON)
        models.start()
        try:
            with pytest.raises(MemoryBudgetError) as caught:
                models.ask(models.models[1])
        finally:
            models.stop(0)
        return str(caught.value).split("; ")[1]

    assert refused("800MiB", a, b) == "raise it, or pin fewer models"
    large = replace(b, engine=replace(b.engine, kv_memory="4GiB"))
    assert refused("1200MiB", a, large) == "raise it, or lower --kv-memory"
    fits_alone = replace(b, engine=replace(b.engine, kv_memory="256MiB"))
    assert refused("1200MiB", a, fits_alone) == "raise it, pin fewer models, or lower --kv-memory"
    small = replace(b, engine=replace(b.engine, kv_memory="1KiB"))
    with pytest.raises(MemoryBudgetError, match=r"models\.b: --kv-memory is 1\.00 KiB, .* at least "):
        Models([a, small], "2GiB", COMMON).start()


def test_an_engine_that_ended_is_loaded_again(paths: dict[str, str]) -> None:
    models = Models([spec("a", paths["a"])], "1GiB", COMMON)
    models.start()
    try:
        backend = models.backends()["a"]

        def fails(engine: Any) -> None:
            raise SystemExit

        # What is no Exception ends the engine's thread.
        backend.thread.call(fails)
        while backend.thread.alive:
            time.sleep(0.01)
        generate(models, models.first)
        assert models.backends()["a"] is not backend
    finally:
        models.stop(0)


def test_several_are_as_exact_as_one(paths: dict[str, str]) -> None:
    """Both compute at the same time, each in its own thread."""
    alone = {}
    for name, path in paths.items():
        with LLM(path, kv_memory="32MiB", block_size=16, progress=False) as llm:
            alone[name] = llm.generate(WORDS, 24).text
    models = Models([spec(name, path) for name, path in paths.items()], "2GiB", COMMON)
    models.start()
    try:
        places = {model.name: models.ask(model) for model in models.models}
        backends = {name: place.came.result(60) for name, place in places.items()}
        futures = {
            name: backend.thread.call(lambda _, llm=backend.llm: llm.generate(WORDS, 24).text)
            for name, backend in backends.items()
        }
        assert {name: future.result(60) for name, future in futures.items()} == alone
        for place in places.values():
            models.leave(place)
    finally:
        models.stop(0)
