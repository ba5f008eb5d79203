"""From the command line and [models.NAME] tables to the models a server has."""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from test_server import onekv

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from test_loader import make_folder

from adapters import save_adapter
from onekv.config import Settings
from onekv.errors import SettingError
from onekv.server.model_settings import ModelSettings
from onekv.server.models.settings import BudgetSettings, idle_seconds
from onekv.server.models.spec import ModelSpec, specs_of

FILE = {"kv_memory": "1GiB", "alias": "gpt-4o"}


def resolve(table: Mapping[str, Any]) -> tuple[Settings, ModelSettings, BudgetSettings]:
    """As for a file with `FILE` above its tables, and no flags."""
    found = {**FILE, **table}
    return Settings.resolve({}, found), ModelSettings.resolve({}, found), BudgetSettings.resolve({}, found)


def specs(*given: str, **tables: Any) -> list[ModelSpec]:
    return specs_of(given, tables, resolve)


def test_the_first_model_has_the_aliases_that_are_given_for_none() -> None:
    first, second = specs("org/one", "org/two")
    assert (first.names, second.names) == (("org/one", "gpt-4o"), ("org/two",))
    assert first.engine.kv_memory == second.engine.kv_memory == "1GiB"


def test_a_table_says_what_is_other_for_its_model() -> None:
    coder, chat = specs(coder={"model": "org/one", "kv_memory": "2GiB", "keep": "pinned"}, chat={"alias": ["a", "b"]})
    assert (coder.name, coder.model, coder.engine.kv_memory, coder.keep) == ("coder", "org/one", "2GiB", "pinned")
    assert (chat.model, chat.engine.kv_memory, chat.keep, chat.names) == ("chat", "1GiB", "lru", ("chat", "a", "b"))


def test_the_command_line_chooses_the_first_table() -> None:
    assert [spec.name for spec in specs("chat", coder={"model": "x"}, chat={"model": "y"})] == ["chat", "coder"]


def test_two_names_for_the_same_weights_are_one_model(tmp_path: Path) -> None:
    tables = {"one": {"model": str(tmp_path)}, "two": {"model": f"{tmp_path}/../{tmp_path.name}", "alias": "three"}}
    (spec,) = specs(**tables)
    assert spec.names == ("one", "gpt-4o", "two", "three")
    tables["two"]["kv_memory"] = "2GiB"
    with pytest.raises(SettingError, match="'one' and 'two' are the same weights"):
        specs(**tables)


def test_weights_that_are_there_twice_are_one_model(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    make_folder(one)
    shutil.copytree(one, two)
    # What nobody loads may differ.
    (two / "README.md").write_text("A copy.")
    (spec,) = specs(one={"model": str(one)}, two={"model": str(two), "alias": "three"})
    assert (spec.names, spec.model) == (("one", "gpt-4o", "two", "three"), str(one))
    (two / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(SettingError, match=r"'one' and 'two' have the same weights .* differ in chat_template.jinja"):
        specs(one={"model": str(one)}, two={"model": str(two)})
    (two / "chat_template.jinja").unlink()
    # A single byte is another model, wherever it is.
    weights = two / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    assert [spec.name for spec in specs(one={"model": str(one)}, two={"model": str(two)})] == ["one", "two"]
    config = json.loads((one / "config.json").read_text()) | {"rope_theta": 5.0}
    shutil.copy(one / "model.safetensors", weights)
    (two / "config.json").write_text(json.dumps(config))
    assert len(specs(one={"model": str(one)}, two={"model": str(two)})) == 2


def test_a_name_and_the_path_that_it_means_are_one_model(smollm2_path: Path) -> None:
    (spec,) = specs("smollm2-135m", again={"model": str(smollm2_path)})
    assert (spec.names, spec.model) == (("smollm2-135m", "gpt-4o", "again"), "smollm2-135m")


def test_adapters_that_are_there_twice_are_one(tmp_path: Path) -> None:
    make_folder(tmp_path / "base")
    for name in ("x", "y", "z"):
        save_adapter(tmp_path / name, str(tmp_path / "base"), seed=int(name == "z"))
    shutil.copytree(tmp_path / "base", tmp_path / "copy")
    tables = {name: {"base": "base", "adapter": str(tmp_path / name)} for name in ("x", "y", "z")}
    tables["z"]["base"] = "copy"
    found = specs(base={"model": str(tmp_path / "base")}, copy={"model": str(tmp_path / "copy")}, **tables)
    assert [spec.names for spec in found] == [("base", "gpt-4o", "copy"), ("x", "y"), ("z",)]
    assert len({spec.weights for spec in found}) == 1


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"a": {"kv_memry": 1}}, "did you mean kv_memory"),
        ({"a": {"disk_limit": "1GB"}}, "applies to all models"),
        ({"a": "org/one"}, "must be a table"),
        ({"a": {"alias": "b"}, "b": {}}, "would name both 'a' and 'b'"),
        ({"default": {}}, "cannot be called 'default'"),
        ({"a": {"keep": "soon"}}, "pinned, lru, or a time"),
        ({"a": {"kv_memory": "much"}}, "kv_memory in the TOML file"),
        ({"a": {}, "b": {"base": "a"}}, "models.b sets base but no adapter"),
        ({"a": {}, "b": {"base": "a", "adapter": "x", "model": "y"}}, "models.b sets both base and model"),
        ({"a": {}, "b": {"base": "c", "adapter": "x"}}, "models.b sets base = 'c', .*others: 'a'"),
        ({"b": {"base": "b", "adapter": "x"}}, "not another model of this server; others: none"),
        (
            {"a": {}, "b": {"base": "a", "adapter": "x"}, "c": {"base": "b", "adapter": "y"}},
            "models.c sets base = 'b', which is itself an adapter",
        ),
        (
            {"a": {"dtype": "float16"}, "b": {"base": "a", "adapter": "x", "dtype": "float32"}},
            "models.b sets dtype = 'float32', but its weights are those of 'a', with dtype float16",
        ),
        (
            {"a": {}, "b": {"base": "a", "adapter": "x", "kernels": "off"}},
            "models.b sets kernels = 'off', but its weights are those of 'a', with kernels auto",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        specs(**tables)


def test_an_adapter_has_the_weights_of_its_base() -> None:
    tables = {
        "coder": {"dtype": "float16", "kernels": "off"},
        "sql": {"base": "coder", "adapter": "x", "kv_memory": "2GiB"},
    }
    sql, coder, css = specs("sql", **tables, css={"base": "coder", "adapter": "y"})
    assert [spec.base for spec in (coder, sql, css)] == [None, "coder", "coder"]
    assert coder.weights == sql.weights == css.weights
    assert (sql.engine.dtype, sql.engine.kernels) == ("float16", "off")
    assert (sql.model, sql.engine.kv_memory, css.engine.kv_memory) == ("coder", "2GiB", "1GiB")
    assert len({spec.adapter for spec in (coder, sql, css)}) == 3
    # Of a model on the command line, by what it is called there.
    first, second = specs("org/one", sql={"base": "org/one", "adapter": "x"})
    assert (second.model, second.base, first.base) == ("org/one", "org/one", None)
    # And without a base, of a model that is not served by itself.
    (alone,) = specs(sql={"model": "org/one", "adapter": "x"})
    assert (alone.base, alone.weights) == ("org/one", first.weights)


def test_an_adapter_of_several_models_is_in_a_table() -> None:
    given = ["org/one", "org/two"]

    def flagged(table: Mapping[str, Any]) -> tuple[Settings, ModelSettings, BudgetSettings]:
        return Settings.resolve({"adapter": "x"}, dict(table)), ModelSettings(), BudgetSettings()

    assert specs_of(given[:1], {}, flagged)[0].engine.adapter == "x"
    with pytest.raises(SettingError, match=r"--adapter is 'x', and there are 2 models; set adapter in the table"):
        specs_of(given, {}, flagged)


def test_how_long_a_model_may_idle() -> None:
    assert [idle_seconds(keep) for keep in ("90s", "10m", "2h")] == [90, 600, 7200]
    assert idle_seconds("pinned") == idle_seconds("lru") == float("inf")


def test_a_wrong_model_shows_at_the_start(tmp_path: Path) -> None:
    ended = onekv("serve", "smollm2-135m", str(tmp_path / "nothing"), "--port", "0", "--hot-only", "on")
    assert ended.returncode == 1 and "nothing" in ended.stderr and "Traceback" not in ended.stderr
