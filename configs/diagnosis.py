"""From what pydantic and the rules say to problems with a line, a value and what is allowed."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from configs.address import without_login
from configs.positions import key_lines
from configs.problems import Problem, nearest_name
from configs.rules import Finding
from configs.run import RunSpec
from configs.section import Section, nested_section

Loc = tuple[str, ...]

_OPEN_TABLES = {("rollout", "engine_args"), ("reward", "arguments")}
_HIDDEN = {("launch", "secrets"), ("launch", "env")}
_PLACEHOLDERS: dict[Loc, object] = {("name",): "placeholder", ("output", "root"): "/placeholder"}

_ALLOWED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text in quotes",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "finite_number": "a finite number",
    "greater_than": "above {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "below {lt}",
    "less_than_equal": "{le} or less",
    "string_pattern_mismatch": "a text of the form {pattern}",
    "literal_error": "{expected}",
}
_WRONG_TYPE = {key for key in _ALLOWED if key.endswith("_type")}
_OUT_OF_RANGE = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}


@dataclass(frozen=True)
class Source:
    """A run file as it was read, with ``--set`` applied to ``raw``."""

    file: str
    text: str
    raw: dict[str, Any]
    set_fields: set[Loc]

    @cached_property
    def lines(self) -> dict[Loc, int]:
        """Computed only for a file with problems."""
        return key_lines(self.text)

    def place(self, loc: Loc) -> tuple[str, int | None]:
        """File and line of a field: its own, or that of the table it would stand in."""
        for end in range(len(loc), 0, -1):
            if loc[:end] in self.set_fields:
                return "--set", None
            if loc[:end] in self.lines:
                return self.file, self.lines[loc[:end]]
        return self.file, None

    def value(self, loc: Loc) -> str | None:
        """What stands at a field, as `show` writes it; None where nothing does."""
        if loc[:2] in _HIDDEN:
            return "(hidden)"
        found: Any = self.raw
        for part in loc:
            if not isinstance(found, dict) or part not in found:
                return None
            found = cast("dict[str, Any]", found)[part]
        return show(found)

    def problem(self, finding: Finding) -> Problem:
        """The problem of a broken rule, placed at the first of its fields that the file sets."""
        locs = [tuple(field.split(".")) for field in finding.fields]
        loc = next((each for each in locs if self.value(each) is not None), locs[0])
        file, line = self.place(loc)
        return Problem(
            file=file,
            line=line,
            field=".".join(loc),
            value="(hidden)" if finding.is_hidden else self.value(loc),
            message=finding.message,
            allowed=finding.allowed,
            nearest=finding.nearest,
        )


def show(value: object) -> str:
    """A value as JSON, which TOML shares but for tables; cut at 80 characters.

    What could be the login of an address is hidden.
    """
    if isinstance(value, datetime.date | datetime.time):
        text = str(value)
    else:
        text = json.dumps(_without_logins(value), ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _without_logins(value: object) -> object:
    if isinstance(value, str):
        return without_login(value)
    if isinstance(value, list):
        return [_without_logins(each) for each in cast("list[object]", value)]
    if isinstance(value, dict):
        table = cast("dict[str, object]", value)
        return {key: _without_logins(each) for key, each in table.items()}
    return value


def problems_of(error: ValidationError, source: Source) -> list[Problem]:
    """One problem for each field that pydantic refused."""
    problems: dict[Loc, Problem] = {}
    for detail in error.errors(include_url=False):
        loc = _loc(detail)
        if loc not in problems:
            problems[loc] = _problem(detail, loc, source)
    return list(problems.values())


def _loc(detail: ErrorDetails) -> Loc:
    """Where, in the file's terms; a value tried as several types counts once."""
    parts = tuple(part for part in detail["loc"] if part != "[key]")
    names = tuple(str(part) for part in parts if isinstance(part, str))
    if names[:2] in _OPEN_TABLES:
        return names[:3]
    key = detail.get("ctx", {}).get("key")
    return (*names, key) if isinstance(key, str) else names


def _problem(detail: ErrorDetails, loc: Loc, source: Source) -> Problem:
    kind, context = detail["type"], detail.get("ctx", {})
    file, line = source.place(loc)
    allowed: str | None = context.get("allowed")
    nearest: str | None = None
    if kind == "extra_forbidden":
        message = "unknown key"
        known = known_names(loc[:-1])
        nearest = nearest_name(loc[-1], known)
        allowed = ", ".join(known)
    elif kind == "missing":
        message, allowed = "required, and not set", _describe(loc)
    elif loc[:2] in _OPEN_TABLES and len(loc) > 2:
        message, allowed = "wrong type", "a text, a number, true or false"
    elif kind in _ALLOWED:
        message = _message(kind)
        allowed = _ALLOWED[kind].format(**context)
        if kind == "literal_error" and isinstance(detail["input"], str):
            nearest = nearest_name(detail["input"], _choices(loc))
    else:
        message = detail["msg"]
    return Problem(
        file=file,
        line=line,
        field=".".join(loc),
        value=source.value(loc),
        message=message,
        allowed=allowed,
        nearest=nearest,
    )


def _message(kind: str) -> str:
    if kind in _WRONG_TYPE:
        return "wrong type"
    return "out of range" if kind in _OUT_OF_RANGE else "not allowed here"


def known_names(table: Loc) -> list[str]:
    """Names a table of the run file takes, aliases included; none for an unknown table."""
    section = section_class(table)
    if section is None:
        return []
    names = [field.alias or name for name, field in section.model_fields.items()]
    return names + list(section.aliases)


def section_class(table: Loc) -> type[Section] | None:
    """The model of a table, such as ``("reward", "code")``; None where there is none."""
    section: type[Section] = RunSpec
    rest = table
    while rest:
        field = _field(section, rest[0])
        inner = nested_section(field.annotation) if field is not None else None
        if inner is None:
            return None
        # [evaluation.sets.NAME]: the name is the user's.
        rest = rest[2:] if rest[0] == "sets" else rest[1:]
        section = inner
    return section


def _field(section: type[Section], name: str) -> FieldInfo | None:
    name = section.aliases.get(name, name)
    fields = section.model_fields
    return fields.get(name) or next((f for f in fields.values() if f.alias == name), None)


def _choices(loc: Loc) -> list[str]:
    section = section_class(loc[:-1])
    field = _field(section, loc[-1]) if section is not None else None
    if field is None:
        return []
    return [choice for choice in _literals(field.annotation) if isinstance(choice, str)]


def _literals(annotation: object) -> list[object]:
    found: list[object] = []
    for argument in get_args(annotation):
        found += _literals(argument) if get_args(argument) else [argument]
    return found


def _describe(loc: Loc) -> str | None:
    section = section_class(loc[:-1])
    if section is None:
        return None
    # Reads source: only for a file with problems.
    from configs.reference import field_docs

    names = {field.alias or name: name for name, field in section.model_fields.items()}
    return field_docs(section).get(names.get(loc[-1], ""))


def without_broken_fields(error: ValidationError, raw: dict[str, Any]) -> set[str]:
    """Take the fields that pydantic refused out of ``raw``; returns their dotted names.

    Required fields get a placeholder, so that the rest can still be cross-checked.
    """
    broken: set[str] = set()
    for detail in error.errors(include_url=False):
        loc = _loc(detail)[:2]
        if not loc:
            continue
        table, own = loc[:-1], loc[len(loc) - 1]
        context = detail.get("ctx", {})
        for key in {own, context.get("alias", own), context.get("name", own)}:
            _remove(raw, (*table, key))
            broken.add(".".join((*table, key)))
    for loc, value in _PLACEHOLDERS.items():
        if ".".join(loc) in broken or loc[0] in broken:
            broken.add(".".join(loc))
            *tables, own = loc
            for part in tables:
                raw = raw.setdefault(part, {})
            raw[own] = value
    return broken


def _remove(raw: dict[str, Any], loc: Loc) -> None:
    table: Any = raw
    for part in loc[:-1]:
        table = cast("dict[str, Any]", table).get(part)
        if not isinstance(table, dict):
            return
    cast("dict[str, Any]", table).pop(loc[-1], None)
