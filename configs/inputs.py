"""What can be checked of a run's inputs from here: files that are readable, prompts that parse.

Assumes no storage provider: a path under a mount of the job that does not exist here is skipped and
listed, anything else that cannot be read is a problem.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from configs.data import Data
from configs.rules.launching import paths_of
from configs.run import RunSpec
from configs.shape import read_config

_MAX_ROWS = 200_000
_MAX_SHOWN = 5
_PARQUET = b"PAR1"
_WRITTEN = {"output.root", "output.compiler_cache"}
_MODELS = {"model.path", "core.reference", "teacher.path", "reward.judge.model"}


@dataclass(slots=True)
class InputReport:
    """What was looked at."""

    problems: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(dotted field, what is wrong)"""
    checked: list[str] = field(default_factory=list[str])
    skipped: list[str] = field(default_factory=list[str])
    """What lies under a mount that is not here, or cannot be read without further packages."""


def absent_inputs(spec: RunSpec) -> dict[str, Path]:
    """Files and folders that the run reads and that are not here, by dotted field."""
    paths = paths_of(spec).items()
    return {name: path for name, path in paths if name not in _WRITTEN and not path.exists()}


def check_inputs(spec: RunSpec) -> InputReport:
    """Look at every input of the run that can be read from here. Reads, never writes."""
    report = InputReport()
    absent = absent_inputs(spec)
    for name, path in paths_of(spec).items():
        if name in _WRITTEN:
            continue
        if name in absent:
            if spec.launch.covers(path):
                report.skipped.append(f"{name}: {path} is under a mount that is not here")
            else:
                report.problems.append((name, f"{path} does not exist"))
        elif name in _MODELS:
            _check_model(name, path, report)
        elif name == "model.tokenizer":
            _expect_folder(name, path, report)
        elif name == "data.train" or name.endswith(".prompts"):
            _check_prompts(name, path, spec.data, report)
        else:
            _check_text(name, path, report)
    _check_root(spec.output.root, report)
    _check_vocabulary(spec, report)
    _check_heads(spec, report)
    return report


def _check_model(name: str, path: Path, report: InputReport) -> None:
    if not _expect_folder(name, path, report):
        return
    config = path / "config.json"
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        report.problems.append((name, f"{config} cannot be read: {error.strerror}"))
        return
    except ValueError as error:
        report.problems.append((name, f"{config} is no JSON: {error}"))
        return
    if not any(path.glob("*.safetensors")):
        report.problems.append((name, f"{path} holds no safetensors"))
        return
    report.checked.append(f"{name}: config.json and safetensors are there")


def _expect_folder(name: str, path: Path, report: InputReport) -> bool:
    if not path.is_dir():
        report.problems.append((name, f"{path} is no folder"))
    return path.is_dir()


def _check_text(name: str, path: Path, report: InputReport) -> None:
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        report.problems.append((name, f"{path} cannot be read as text: {error}"))
        return
    report.checked.append(f"{name}: readable")


def _check_prompts(name: str, path: Path, data: Data, report: InputReport) -> None:
    """Every row of a JSONL file, up to a bound; of a Parquet file only that it is one."""
    if path.suffix == ".parquet":
        with path.open("rb") as file:
            is_parquet = file.read(len(_PARQUET)) == _PARQUET
        if not is_parquet:
            report.problems.append((name, f"{path} is no Parquet file"))
        else:
            report.skipped.append(f"{name}: columns of a Parquet file are read at `prepare`")
        return
    rows = found = 0
    try:
        for line, problem in _row_problems(path, data):
            rows += 1
            if problem is not None:
                found += 1
                if found <= _MAX_SHOWN:
                    report.problems.append((name, f"{path}:{line}: {problem}"))
    except (OSError, UnicodeDecodeError) as error:
        report.problems.append((name, f"{path} cannot be read: {error}"))
        return
    if found > _MAX_SHOWN:
        report.problems.append((name, f"{path}: {found - _MAX_SHOWN} more rows with problems"))
    if rows == 0:
        report.problems.append((name, f"{path} holds no prompts"))
    elif found == 0:
        first = " (only the first)" if rows >= _MAX_ROWS else ""
        report.checked.append(f"{name}: {rows} prompts parse{first}")


def _row_problems(path: Path, data: Data) -> Iterator[tuple[int, str | None]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if number > _MAX_ROWS:
                return
            if line.strip():
                yield number, row_problem(line, data)


def row_problem(line: str, data: Data) -> str | None:
    """What is wrong with a row of prompts; None when it has the fields `[data]` names."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"no JSON: {error}"
    if not isinstance(row, dict):
        return "no JSON object"
    table = cast("dict[str, Any]", row)
    prompt = table.get(data.prompt_field)
    if prompt is None:
        names = ", ".join(map(str, table))
        return f"no field {data.prompt_field!r} (data.prompt_field); it has {names}"
    if isinstance(prompt, list):
        if not data.apply_chat_template:
            return f"{data.prompt_field!r} is a chat, and data.apply_chat_template is off"
        if not prompt or not all(_is_message(message) for message in cast("list[object]", prompt)):
            return f"{data.prompt_field!r} is a list, but no chat of role and content"
    elif not isinstance(prompt, str) or not prompt:
        return f"{data.prompt_field!r} is neither a text nor a chat"
    verifier = table.get(data.verifier_field) if data.verifier_field is not None else None
    if verifier is not None and not isinstance(verifier, str):
        return f"{data.verifier_field!r} names no verifier"
    return None


def _is_message(message: object) -> bool:
    if not isinstance(message, dict):
        return False
    table = cast("dict[str, Any]", message)
    return isinstance(table.get("role"), str) and "content" in table


def _check_root(root: Path, report: InputReport) -> None:
    """The output root is a folder, or can become one: its nearest existing parent is one."""
    existing = next((p for p in (root, *root.parents) if p.exists()), None)
    if existing is not None and not existing.is_dir():
        report.problems.append(("output.root", f"{existing} is a file"))


def _check_vocabulary(spec: RunSpec, report: InputReport) -> None:
    """Teacher and student share the vocabulary: equal digests of their token tables."""
    teacher = spec.teacher.path if spec.teacher is not None else None
    student = spec.model.tokenizer or spec.model.path
    if spec.teacher is not None and spec.teacher.url:
        report.skipped.append("teacher.url: its servers and their vocabulary, seen at the start")
    if teacher is None or student is None:
        return
    digests = [vocabulary_digest(path) for path in (student, teacher)]
    if None in digests:
        report.skipped.append("teacher.path: vocabularies cannot both be read from here")
    elif digests[0] != digests[1]:
        text = f"another vocabulary: student {digests[0]}, teacher {digests[1]}"
        report.problems.append(("teacher.path", text))
    else:
        report.checked.append("teacher.path: same vocabulary as the student")


def _check_heads(spec: RunSpec, report: InputReport) -> None:
    """Ranks that share a row have some heads each, of every model they hold beside the policy's."""
    context = spec.core.context
    held = {
        "core.reference": spec.core.reference if spec.core.uses_reference else None,
        "teacher.path": spec.teacher.path if spec.teacher is not None else None,
    }
    for name, path in held.items():
        shape = read_config(path / "config.json") if path is not None else None
        if shape is None or spec.core.backend != "torch":
            continue
        common = math.gcd(shape.heads, shape.kv_heads)
        if common % context:
            text = (
                f"core.context = {context} does not divide its {shape.heads} heads and "
                f"{shape.kv_heads} key/value heads; a divisor of {common} does"
            )
            report.problems.append((name, text))


def vocabulary_digest(folder: Path) -> str | None:
    """SHA-256 of a tokenizer's token table with its added tokens; None without a tokenizer.json."""
    try:
        tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        added = [(t["content"], t["id"]) for t in tokenizer.get("added_tokens", [])]
        table = [tokenizer["model"]["vocab"], sorted(added)]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
