"""From a TOML file to a `RunSpec`, or to every problem the file has."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from configs.address import without_login
from configs.diagnosis import Source, problems_of, section_class, without_broken_fields
from configs.problems import Problem, RunFileError
from configs.rules import check
from configs.run import RunSpec
from configs.shape import ModelShape, read_shape

Table = dict[str, Any]

_ROUNDS = 8
_TOML_LINE = re.compile(r" \(at line (\d+), column \d+\)| \(at end of document\)")
_SET = re.compile(r"\s*([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)\s*=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRun:
    """A run file that describes a run."""

    spec: RunSpec
    path: Path
    """Absolute path of the file."""
    text: str
    """The file as it was read; ``--set`` is not in it."""
    sets: tuple[str, ...]
    warnings: tuple[str, ...]
    shape: ModelShape | None
    """What the model's config.json says; None where it cannot be read from here."""


def load_run(path: Path | str, sets: Sequence[str] = ()) -> LoadedRun:
    """Read, check and cross-check a run file.

    Args:
        path: the TOML file; relative paths in it, and in ``sets``, count from its folder.
        sets: ``section.key=TOML-VALUE``, applied in order after loading. Each replaces its value
            totally: a table given here takes nothing from the file's table.

    Raises:
        RunFileError: if anything is wrong; it holds every problem at once. Of a file that is no
            TOML it says only that.
    """
    path = Path(path).absolute()
    text = _read(path)
    raw = _parse(path, text)
    origins, problems = _apply_sets(raw, sets)
    source = Source(file=str(path), text=text, raw=raw, set_fields=origins)
    spec, broken = _build(source, path.parent, problems)
    shape = read_shape(spec.model) if spec is not None else None
    findings = check(spec, shape) if spec is not None else []
    sound = [finding for finding in findings if not finding.touches(broken)]
    problems += [source.problem(finding) for finding in sound if not finding.is_warning]
    if problems or spec is None:
        raise RunFileError(problems)
    warnings = tuple(finding.message for finding in sound)
    return LoadedRun(
        spec=spec, path=path, text=text, sets=tuple(sets), warnings=warnings, shape=shape
    )


def load_frozen(path: Path | str) -> LoadedRun:
    """Read the resolved run file of an attempt (``run.json``): checked when it was frozen.

    Raises:
        RunFileError: if it cannot be read or was written by another version.
    """
    path = Path(path).absolute()
    text = _read(path)
    try:
        spec = RunSpec.model_validate_json(text)
    except ValidationError as error:
        raise _unreadable(path, f"no run file of this version: {error}") from error
    return LoadedRun(
        spec=spec, path=path, text=text, sets=(), warnings=(), shape=read_shape(spec.model)
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise _unreadable(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _unreadable(path, f"is not UTF-8 (byte {error.start})") from error


def _parse(path: Path, text: str) -> Table:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = _TOML_LINE.search(str(error))
        line = int(match[1]) if match and match[1] else text.count("\n") + 1
        message = f"no TOML: {_TOML_LINE.sub('', str(error))}"
        raise _unreadable(path, message, line) from error
    except RecursionError as error:
        raise _unreadable(path, "no run file: nested too deep") from error


def _unreadable(path: Path, message: str, line: int | None = None) -> RunFileError:
    problem = Problem(file=str(path), line=line, field="", value=None, message=message)
    return RunFileError([problem])


def _apply_sets(raw: Table, sets: Iterable[str]) -> tuple[set[tuple[str, ...]], list[Problem]]:
    """Replace values in ``raw``; returns which fields were replaced, and what could not be read."""
    fields: set[tuple[str, ...]] = set()
    problems: list[Problem] = []
    for text in sets:
        try:
            key, value = parse_set(text)
            _replace(raw, key, value)
            fields.add(key)
        except ValueError as error:
            problems.append(
                Problem(
                    file="--set",
                    line=None,
                    field=text.partition("=")[0].strip(),
                    value=None,
                    message=str(error),
                    allowed="--set 'section.key=TOML-VALUE'; texts need their quotes",
                )
            )
    return fields, problems


def parse_set(text: str) -> tuple[tuple[str, ...], object]:
    """Key and value of ``section.key=TOML-VALUE``.

    Raises:
        ValueError: if there is no key, or the value is not exactly one TOML value.
    """
    match = _SET.fullmatch(text)
    if match is None:
        raise ValueError("no `section.key=value`")
    try:
        table = tomllib.loads(f"value = {match[2].strip()}")
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{without_login(match[2].strip())} is no TOML value") from error
    if list(table) != ["value"]:
        raise ValueError("more than one TOML value")
    return tuple(match[1].split(".")), table["value"]


def _replace(raw: Table, key: tuple[str, ...], value: object) -> None:
    table = raw
    for part in key[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{part} is a value in the file, no table")
        table = cast("Table", inner)
    for other in _other_spellings(key):
        # Replacing is total: the same field under its other name must not conflict with it.
        table.pop(other, None)
    table[key[-1]] = value


def _other_spellings(key: tuple[str, ...]) -> set[str]:
    section = section_class(key[:-1])
    if section is None:
        return set()
    name = section.aliases.get(key[-1], key[-1])
    return {name, *(alias for alias, own in section.aliases.items() if own == name)} - {key[-1]}


def _build(
    source: Source, folder: Path, problems: list[Problem]
) -> tuple[RunSpec | None, set[str]]:
    """The spec of a file, and the dotted fields that had to be left out of it.

    A field that is refused is noted and left out, and the rest is looked at again: one refusal can
    hide others in its section, and rules across fields still hold between sound ones. Every round
    leaves something out, so few are needed; None when the file is beyond that.
    """
    raw, broken = deepcopy(source.raw), set[str]()
    for _ in range(_ROUNDS):
        try:
            return RunSpec.model_validate(raw, context={"folder": folder}), broken
        except ValidationError as error:
            seen = {problem.field for problem in problems}
            problems += [each for each in problems_of(error, source) if each.field not in seen]
            broken |= without_broken_fields(error, raw)
    return None, broken
