"""`install` says which names of mlx-lm it replaces: compared with what really changes in mlx-lm's and MLX's modules."""

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx_lm.models
import pytest

import onekv.mlx_lm
from onekv.memory import hook


@pytest.fixture(scope="module", autouse=True)
def every_model_is_loaded() -> None:
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        # Ends the process where a package of its own is not installed.
        if module.name != "olmo":
            importlib.import_module(f"mlx_lm.models.{module.name}")


def names() -> dict[str, Any]:
    """All that the modules of mlx-lm and MLX hold."""
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("mlx", "mlx_lm")}
    return {f"{module}.{name}": value for module in modules for name, value in vars(modules[module]).items()}


def methods(held: dict[str, Any]) -> dict[str, Any]:
    """What the classes in `held` have."""
    classes = {name: value for name, value in held.items() if isinstance(value, type)}
    return {f"{name}.{method}": value for name in classes for method, value in vars(classes[name]).items()}


def changes(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)}


def test_the_list_is_what_changes_and_uninstall_restores_exactly_that() -> None:
    assert onekv.mlx_lm.replaced() == []
    before = names()
    inside = methods(before)
    with onekv.mlx_lm.installed():
        replaced = onekv.mlx_lm.replaced()
        during = names()
        assert changes(inside, methods(before)) == set()
    assert set(replaced) == changes(before, during) and len(set(replaced)) == len(replaced)
    assert set(onekv.mlx_lm.REPLACES) <= set(replaced)
    # Elsewhere in mlx-lm it is the same names, imported, and one more that mlx-lm does not have.
    known = {name.rpartition(".")[2] for name in onekv.mlx_lm.REPLACES}
    assert {name.rpartition(".")[2] for name in replaced} == {*known, "TurboQuantKVCache"}
    assert onekv.mlx_lm.replaced() == []
    assert changes(before, names()) == set()


def test_a_module_that_is_loaded_later_is_in_the_list_and_restored() -> None:
    stock = mlx_lm.models.cache.KVCache
    old = sys.modules.pop("mlx_lm.models.llama")
    try:
        with onekv.mlx_lm.installed():
            later = importlib.import_module("mlx_lm.models.llama")
            assert later is not old and later.KVCache is onekv.mlx_lm.KVCache
            assert "mlx_lm.models.llama.KVCache" in onekv.mlx_lm.replaced()
        # Where an LLM has run such a model in this process, the name stays replaced for it.
        attention = hook.attention if "mlx_lm.models.llama" in hook.hooked else hook.stock_attention
        assert later.KVCache is stock and later.scaled_dot_product_attention is attention
    finally:
        sys.modules["mlx_lm.models.llama"] = mlx_lm.models.llama = old


# In a process of its own, where no other LLM has run.
BESIDE_AN_LLM = """
import sys
import onekv.mlx_lm
from architectures import build
from onekv import LLM
from onekv.memory import hook

build("llama")
name = f"mlx_lm.models.llama.{hook.NAME}"
with onekv.mlx_lm.installed():
    assert name in onekv.mlx_lm.replaced()
    LLM(build("llama"), kv_memory="1MB", block_size=16, max_batch=1).close()
    assert name not in onekv.mlx_lm.replaced()
    assert f"mlx_lm.models.base.{hook.NAME}" in onekv.mlx_lm.replaced()
assert getattr(sys.modules["mlx_lm.models.llama"], hook.NAME) is hook.attention
assert onekv.mlx_lm.replaced() == []
"""


def test_the_attention_of_an_llms_model_is_not_in_the_list() -> None:
    """The LLM replaces it in the modules of its model, and there it stays."""
    command = [sys.executable, "-c", BESIDE_AN_LLM]
    result = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_documentation_has_every_name() -> None:
    text = (Path(__file__).parents[2] / "docs" / "mlx-lm.md").read_text()
    listed = re.findall(r"^\| `(mlx_lm\.[\w.]+)`", text, re.MULTILINE)
    assert sorted(listed) == sorted(onekv.mlx_lm.REPLACES)
