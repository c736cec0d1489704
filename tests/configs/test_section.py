from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from configs.section import parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("4h", 14400),
        ("30m", 1800),
        ("90s", 90),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("2d", 172800),
        ("0", 0),
        ("0s", 0),
        (10, 10),
        (0.5, 0.5),
    ],
)
def test_durations_are_seconds(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "4", "h", "4 hours", "-1s", "1s1h", "1h 30m", -1, math.inf])
def test_other_texts_are_no_durations(text: object) -> None:
    with pytest.raises(PydanticCustomError):
        parse_duration(text)


@given(st.integers(0, 99), st.integers(0, 59), st.integers(0, 59))
def test_parts_of_a_duration_add_up(hours: int, minutes: int, seconds: int) -> None:
    assert parse_duration(f"{hours}h{minutes}m{seconds}s") == 3600 * hours + 60 * minutes + seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("256 GiB", 256 * 2**30), ("1.5KiB", 1536), ("7 B", 7), ("2 TiB", 2**41), (12, 12)],
)
def test_sizes_are_bytes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "256", "256 GB", "-1 GiB", "0 B", 0, -3, True, 1.5])
def test_other_texts_are_no_sizes(text: object) -> None:
    with pytest.raises(PydanticCustomError):
        parse_size(text)
