"""Sizes as people write them."""

import pytest

from onekv.errors import SettingError
from onekv.units import format_seconds, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        (2**60 + 1, 2**60 + 1),
        ("1234", 1234),
        ("10B", 10),
        ("512MB", 512 * 10**6),
        ("512 mb", 512 * 10**6),
        (" 4GiB ", 4 * 2**30),
        ("2g", 2 * 10**9),
        ("1.5KiB", 1536),
        ("0.1GB", 10**8),
        ("1TB", 10**12),
        ("2TiB", 2 * 2**40),
        (1e9, 10**9),
        # Exact where a float would not be.
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "-5MB",
        "1,5GB",
        "12XB",
        "4 G B",
        "%",
        "1e9",
        "nan",
        "5%%",
        "0x10",
        True,
        1.5,
        float("inf"),
        None,
        [1],
        b"1GB",
    ],
)
def test_what_is_no_size_is_refused_with_its_name(text):
    with pytest.raises(SettingError) as caught:
        parse_size(text, whole=100, name="--kv-memory")
    assert f"--kv-memory={text!r} is not a size" in str(caught.value)


@pytest.mark.parametrize("text", [0, -1, "0", "0GB", "0.4", "0%"])
def test_no_bytes_are_refused(text):
    with pytest.raises(SettingError) as caught:
        parse_size(text, whole=100, name="--kv-memory")
    assert f"--kv-memory={text!r} must be more than 0 bytes" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "whole", "size"), [("50%", 1000, 500), ("12.5 %", 800, 100), ("100%", 7, 7), ("33%", 10, 3)]
)
def test_percentages_are_of_the_whole_and_rounded_down(text, whole, size):
    assert parse_size(text, whole=whole) == size


def test_percentage_of_nothing_in_particular_is_refused():
    with pytest.raises(SettingError, match="disk_limit='50%': a percentage has no meaning here"):
        parse_size("50%", name="disk_limit")


def test_a_number_too_large_for_a_float_is_still_a_number():
    assert parse_size("9" * 400) == 10**400 - 1


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20, "1.00 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (5 * 2**40, "5.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_format_takes_the_largest_unit_that_leaves_one(size, text):
    assert format_size(size) == text


@pytest.mark.parametrize("size", [1, 1000, 10**6, 2**30, 123456789012])
def test_what_is_formatted_can_be_read_back(size):
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.005)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.9, "59 s"), (60, "1 min"), (7199, "1 h"), (200_000, "2 d")]
)
def test_times_take_the_largest_unit_that_leaves_one(seconds, text):
    assert format_seconds(seconds) == text
