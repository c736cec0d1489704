from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.positions import Key, key_lines

_BARE = st.text("abcdefghij_-0123456789", min_size=1, max_size=6)
_TEXT = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=12)


def _basic(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


_KEY = _BARE | _TEXT.map(_basic)
_SCALAR = st.one_of(
    st.integers().map(str),
    st.booleans().map(lambda value: str(value).lower()),
    _TEXT.map(_basic),
    _TEXT.filter(lambda text: "'" not in text).map(lambda text: f"'{text}'"),
    st.just("1979-05-27 07:32:00"),
    # Fences, escapes and quotes that look like the end of a value, or like keys.
    st.just('"""\nkey = 1 # no key\n[no.table]\n\\""" x = 2 """'),
    st.just("'''\nit''s = 'x'\n'''"),
    st.just('"""two quotes at the end: """""'),
)
_ARRAY = st.lists(_SCALAR, max_size=3).map(
    lambda items: "[ # items = 0\n" + "".join(f"  {item}, # }}\n" for item in items) + "]"
)
_INLINE = st.just('{ p = 1, "q r" = [ "}" , { s = 2 } ], t.u = \'}\' }')
_VALUE = _SCALAR | _ARRAY | _INLINE


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, dict[Key, int]]:
    """A document, and the line on which each of its own keys was written."""
    lines: list[str] = []
    expected: dict[Key, int] = {}

    def line_number() -> int:
        return "\n".join([*lines, ""]).count("\n") + 1 if lines else 1

    table: Key = ()
    for _ in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(["key", "key", "dotted", "table", "blank"]))
        name, inner = draw(_KEY), draw(_KEY)
        if kind == "blank":
            lines.append(draw(st.sampled_from(["", "   ", "# a = 1", "# [x]"])))
            continue
        text = {
            "key": f"{name}={draw(_VALUE)}  # note",
            "dotted": f"  {name} . {inner}  =\t{draw(_SCALAR)}",
            "table": f"[ {name}.{inner} ]",
        }[kind]
        parts: Key = tuple(_plain(part) for part in ((name,) if kind == "key" else (name, inner)))
        try:
            tomllib.loads("\n".join([*lines, text]))
        except tomllib.TOMLDecodeError:
            continue  # defined twice
        number = line_number()
        lines.append(text)
        base = () if kind == "table" else table
        for end in range(1, len(parts) + 1):
            expected.setdefault((*base, *parts[:end]), number)
        table = parts if kind == "table" else table
    return "\n".join(lines), expected


def _plain(key: str) -> str:
    return next(iter(tomllib.loads(f"{key} = 1")))


@given(documents())
def test_every_key_is_found_on_its_line(document: tuple[str, dict[Key, int]]) -> None:
    text, expected = document
    found = key_lines(text)
    assert {key: found.get(key) for key in expected} == expected


@given(documents())
def test_keys_found_are_keys_of_the_document(document: tuple[str, dict[Key, int]]) -> None:
    parsed = tomllib.loads(document[0])
    for key in key_lines(document[0]):
        value: Any = parsed
        for part in key:
            value = value[part]


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("a = 1\r\n[b]\r\nc = 2\r\n", ("b", "c"), 3),
        ("[[a]]\nb = 1\n[[a]]\nc = 2", ("a", "c"), 4),
        ('[a]\nb = { c = """\n""", d = 1 }', ("a", "b", "d"), 3),
        ("\n\n[a.b.c]\n", ("a", "b"), 3),
    ],
)
def test_line_of(text: str, key: Key, line: int) -> None:
    assert key_lines(text)[key] == line
