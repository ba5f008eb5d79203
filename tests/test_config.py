"""A field, a flag and a variable are one thing."""

import argparse
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onekv.cli.options import add_settings, resolved
from onekv.config import DTYPES, Settings, flag, read_file, variable
from onekv.errors import SettingError
from onekv.server.model_settings import ModelSettings
from onekv.server.models.settings import BudgetSettings
from onekv.server.settings import ServerSettings

NAMES = [f.name for f in fields(Settings)]
# Per setting: what is typed, what it becomes, and another value.
VALUES: dict[str, tuple[str, Any, Any]] = {
    "kv_memory": ("512MB", "512MB", "1GiB"),
    "block_size": ("32", 32, 16),
    "max_batch": ("3", 3, 5),
    "prefill_chunk": ("100", 100, 200),
    "decode_steps": ("4", 4, 2),
    "max_kv_size": ("1024", 1024, 2048),
    "speculate": ("lookup", "lookup", "off"),
    "draft_model": ("small.gguf", "small.gguf", "another"),
    "draft_tokens": ("7", 7, 3),
    "adapter": ("adapters/sql", "adapters/sql", "another"),
    "prefix_cache": ("off", False, True),
    "dtype": ("float16", "float16", "bfloat16"),
    "kernels": ("off", "off", "auto"),
    "kv_format": ("q8", "q8", "k8v4"),
    "kv_plain_layers": ("2", 2, 1),
    "disk_cache": ("a folder", "a folder", "auto"),
    "disk_limit": ("20GB", "20GB", "5%"),
    "disk_policy": ("write_through", "write_through", "write_back"),
    "disk_write_budget": ("50GB", "50GB", "1GB"),
    "disk_queue": ("100MiB", "100MiB", "1GiB"),
    "remote_tier": ("valkey://cache:6379/0", "valkey://cache:6379/0", "file:///shared"),
    "remote_password": ("a password", "a password", "another"),
    "tier_secret": ("a secret of some length", "a secret of some length", "none"),
    "remote_write": ("all", "all", "off"),
    "remote_write_rate": ("20MB", "20MB", "1GB"),
    "hot_only": ("on", True, False),
    "check_integrity": ("on", True, False),
}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(variable(name), raising=False)


def parse(*argv: str) -> Settings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_settings(parser)
    return resolved(Settings, parser.parse_args(argv))


def test_counts_are_checked_by_default_in_development():
    code = "import os; os.environ.pop('ONEKV_CHECK_INTEGRITY', None); from onekv.config import Settings; "
    code += "print(Settings().check_integrity)"
    for flags, expected in (([], "False"), (["-X", "dev", "-W", "ignore"], "True")):
        done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def test_the_table_above_covers_every_setting():
    assert set(VALUES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_field_flag_and_variable_give_the_same(name, monkeypatch):
    text, value, _ = VALUES[name]
    by_field = Settings.resolve({name: value})
    assert getattr(by_field, name) == value != getattr(Settings(), name)
    assert parse(flag(name), text) == by_field
    monkeypatch.setenv(variable(name), text)
    assert Settings.resolve({}) == by_field
    assert parse() == by_field


def test_how_they_are_spelled():
    assert flag("kv_memory") == "--kv-memory"
    assert variable("kv_memory") == "ONEKV_KV_MEMORY"


@pytest.mark.parametrize("name", NAMES)
def test_the_call_wins_over_the_variable_and_that_over_the_default(name, monkeypatch):
    text, value, other = VALUES[name]
    default = getattr(Settings(), name)
    assert getattr(Settings.resolve({name: None}), name) == default
    monkeypatch.setenv(variable(name), text)
    assert getattr(Settings.resolve({name: None}), name) == value
    assert getattr(Settings.resolve({name: other}), name) == other
    monkeypatch.setenv(variable(name), "")
    assert getattr(Settings.resolve({}), name) == default


@pytest.mark.parametrize("name", NAMES)
def test_help_names_flag_and_variable(name):
    parser = argparse.ArgumentParser()
    add_settings(parser)
    text = parser.format_help()
    assert flag(name) in text
    assert variable(name) in text
    assert "%%" not in text


COUNTS = ("block_size", "max_batch", "prefill_chunk", "decode_steps", "max_kv_size", "draft_tokens")
SIZES = ("kv_memory", "disk_limit", "disk_write_budget", "disk_queue", "remote_write_rate")
SWITCHES = ("prefix_cache", "hot_only", "check_integrity")


@pytest.mark.parametrize("name", NAMES)
def test_a_text_means_the_same_in_every_place(name, monkeypatch):
    """As a keyword, a flag, a variable, in a TOML file and in the object's own call."""
    text, value, other = VALUES[name]
    by_keyword = Settings.resolve({name: text})
    assert getattr(by_keyword, name) == value
    assert type(getattr(by_keyword, name)) is type(value)
    assert Settings(**{name: text}) == by_keyword
    assert parse(flag(name), text) == by_keyword
    assert Settings.resolve({}, {name: text}) == Settings.resolve({}, {name: value}) == by_keyword
    monkeypatch.setenv(variable(name), text)
    assert Settings.resolve({}, {name: other}) == by_keyword


@pytest.mark.parametrize("name", NAMES)
def test_none_is_not_given(name):
    assert Settings(**{name: None}) == Settings()


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize(
    ("value", "on"), [("off", False), ("No", False), ("0", False), (0, False), ("on", True), (1, True)]
)
def test_switches_as_people_write_them(name, value, on):
    assert getattr(Settings.resolve({name: value}), name) is on


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", ["maybe", "", 2, 1.0, [], object])
def test_what_is_no_switch_is_refused(name, value):
    with pytest.raises(SettingError) as caught:
        Settings(**{name: value})
    assert str(caught.value) == f"{flag(name)} is {value!r}; it must be on or off"


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_numbers_or_texts(name):
    assert getattr(Settings(**{name: 8e9}), name) == 8 * 10**9
    assert getattr(Settings(**{name: np.int64(5)}), name) == 5
    for value in (True, 1.5, "many", [1], Path("1GB")):
        with pytest.raises(SettingError) as caught:
            Settings(**{name: value})
        assert f"{flag(name)}={value!r} is not a size" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("dtype", True, "--dtype is True; it must be one of float32"),
        ("disk_policy", 1, "--disk-policy is 1; it must be one of write_back"),
        ("speculate", True, "--speculate is True; it must be one of auto, off, lookup, draft"),
        ("speculate", "on", "--speculate is 'on'; it must be one of auto, off, lookup, draft"),
        ("kv_format", True, "--kv-format must be text"),
        ("tier_secret", ["a secret"], "^--tier-secret must be text$"),
        ("kv_plain_layers", -1, "--kv-plain-layers is -1; it must be a whole number of at least 0"),
        ("kv_plain_layers", True, "--kv-plain-layers is True; it must be a whole number"),
        ("disk_cache", True, "--disk-cache is True; it must be a folder"),
        ("disk_cache", 5, "--disk-cache is 5; it must be a folder"),
        ("disk_cache", b"kv", "--disk-cache is b'kv'; it must be a folder"),
        ("disk_cache", " ", "--disk-cache is empty; use a folder, or auto"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_name(name, value, text):
    with pytest.raises(SettingError, match=text):
        Settings(**{name: value})
    with pytest.raises(SettingError, match=text.partition(" ")[2].partition("; ")[0].removeprefix("is ")):
        Settings.resolve({}, {name: value})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("port", 70000, "--port is 70000; it must be a whole number from 0 to 65535"),
        ("port", "http", "--port is 'http'; it must be a whole number from 0 to 65535"),
        ("max_waiting", -1, "--max-waiting is -1; it must be a whole number of at least 0"),
        ("max_wait", 0, "--max-wait is 0; it must be a whole number of at least 1"),
        ("log_level", "loud", "--log-level is 'loud'; it must be one of error, warning, info, debug"),
        ("max_body", "50%", "--max-body='50%': a percentage has no meaning here; write bytes like 4GiB"),
    ],
)
def test_settings_of_the_server_are_checked_alike(name, value, text, monkeypatch):
    with pytest.raises(SettingError) as caught:
        ServerSettings(**{name: value})
    assert str(caught.value) == text
    monkeypatch.setenv(variable(name), str(value))
    with pytest.raises(SettingError, match=variable(name)):
        ServerSettings.resolve({})


@pytest.mark.parametrize("kind", [Settings, ServerSettings, ModelSettings, BudgetSettings])
def test_every_setting_says_what_it_is_and_what_its_default_is(kind):
    for each in kind.defined():
        assert each.help and each.metavar and each.default_text, each.name
        # A number that is not a port has a unit.
        assert each.unit or type(each.default) is not int or each.name == "port"


def test_a_folder_may_be_a_path():
    assert Settings(disk_cache=Path("some") / "where").disk_cache == "some/where"


def test_the_place_of_a_wrong_value_is_named(monkeypatch):
    with pytest.raises(SettingError, match="block_size in the TOML file=0 is not a whole number of at least 1"):
        Settings.resolve({}, {"block_size": 0})
    with pytest.raises(SettingError, match="--block-size is 'many'; it must be a whole number of at least 1"):
        parse("--block-size", "many")
    monkeypatch.setenv("ONEKV_KV_MEMORY", "lots")
    with pytest.raises(SettingError, match="ONEKV_KV_MEMORY='lots' is not a size"):
        Settings.resolve({})


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -3, 1.5, 64.0, True, "many", "1.5", "", [64]])
def test_counts_must_be_whole_and_positive(name, value):
    with pytest.raises(SettingError) as caught:
        Settings.resolve({name: value})
    assert f"{flag(name)} is {value!r}; it must be a whole number of at least 1" in str(caught.value)


@pytest.mark.parametrize("name", ["block_size", "max_batch", "prefill_chunk", "max_kv_size"])
def test_a_variable_that_is_no_number_is_named(name, monkeypatch):
    monkeypatch.setenv(variable(name), "many")
    with pytest.raises(SettingError, match=f"{variable(name)}='many' is not a whole number"):
        Settings.resolve({})


@pytest.mark.parametrize("value", ["lots", "-1GB", 0, "0%"])
def test_kv_memory_is_checked_before_a_model_is_loaded(value):
    with pytest.raises(SettingError) as caught:
        Settings.resolve({"kv_memory": value})
    assert f"--kv-memory={value!r}" in str(caught.value)


@pytest.mark.parametrize("value", ["512MB", "50%", 10**9])
def test_kv_memory_may_be_a_size_a_share_or_bytes(value):
    assert Settings.resolve({"kv_memory": value}).kv_memory == value


def test_dtype_is_one_of_the_known_ones():
    with pytest.raises(SettingError, match=f"--dtype is 'int3'; it must be one of {', '.join(DTYPES)}"):
        Settings.resolve({"dtype": "int3"})


def test_a_wrong_variable_loses_to_a_right_keyword(monkeypatch):
    monkeypatch.setenv("ONEKV_BLOCK_SIZE", "many")
    assert Settings.resolve({"block_size": 8}).block_size == 8


def test_an_unknown_setting_is_refused_with_the_known_ones():
    with pytest.raises(
        SettingError, match=r"unknown setting 'kv_memroy'; available: kv_memory, block_size.*"
    ) as caught:
        Settings.resolve({"kv_memroy": "1GB"})
    assert str(caught.value).endswith("; did you mean kv_memory?")


def test_an_unknown_name_in_a_file_is_refused_with_a_near_one(tmp_path):
    file = tmp_path / "onekv.toml"
    file.write_text('block-size = "64"\n')
    with pytest.raises(SettingError, match=r"sets 'block-size'; available: .*; did you mean block_size\?"):
        read_file(str(file), NAMES)


def test_settings_do_not_change():
    with pytest.raises(AttributeError):
        Settings().block_size = 5
