"""A field, a flag and a variable are one thing."""

import argparse
from dataclasses import fields
from typing import Any

import pytest

from onekv.config import DTYPES, Settings, add_arguments, flag, given_settings, variable
from onekv.errors import SettingError

NAMES = [f.name for f in fields(Settings)]
# Per setting: what is typed, what it becomes, and another value.
VALUES: dict[str, tuple[str, Any, Any]] = {
    "kv_memory": ("512MB", "512MB", "1GiB"),
    "block_size": ("32", 32, 16),
    "max_batch": ("3", 3, 5),
    "prefill_chunk": ("100", 100, 200),
    "decode_steps": ("4", 4, 2),
    "max_kv_size": ("1024", 1024, 2048),
    "prefix_cache": ("off", False, True),
    "dtype": ("float16", "float16", "bfloat16"),
    "kv_format": ("q8", "q8", "k8v4"),
    "kv_plain_layers": ("2", 2, 1),
    "disk_cache": ("a folder", "a folder", "auto"),
    "disk_limit": ("20GB", "20GB", "5%"),
    "disk_policy": ("write_through", "write_through", "write_back"),
    "disk_write_budget": ("50GB", "50GB", "1GB"),
    "disk_queue": ("100MiB", "100MiB", "1GiB"),
    "hot_only": ("on", True, False),
}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(variable(name), raising=False)


def parse(*argv: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return given_settings(parser.parse_args(argv))


def test_the_table_above_covers_every_setting():
    assert set(VALUES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_field_flag_and_variable_give_the_same(name, monkeypatch):
    text, value, _ = VALUES[name]
    by_field = Settings.resolve({name: value})
    assert getattr(by_field, name) == value != getattr(Settings(), name)
    assert Settings.resolve(parse(flag(name), text)) == by_field
    monkeypatch.setenv(variable(name), text)
    assert Settings.resolve({}) == by_field
    assert Settings.resolve(parse()) == by_field


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
    add_arguments(parser)
    text = parser.format_help()
    assert flag(name) in text
    assert variable(name) in text
    assert "%%" not in text


@pytest.mark.parametrize("name", ["block_size", "max_batch", "prefill_chunk", "max_kv_size"])
@pytest.mark.parametrize("value", [0, -3, 1.5, "64"])
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
    with pytest.raises(SettingError, match=r"unknown setting 'kv_memroy'; there are kv_memory, block_size"):
        Settings.resolve({"kv_memroy": "1GB"})


def test_settings_do_not_change():
    with pytest.raises(AttributeError):
        Settings().block_size = 5
