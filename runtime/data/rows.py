"""Rows of a prompt file as their author wrote them: read strictly, complained about all at once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

from runtime.errors import ConfigError

_SHOWN = 20
_BATCH_ROWS = 1024
_JSONL = {".jsonl", ".ndjson", ".json"}
_PARQUET = {".parquet", ".pq"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """Which field of a row holds what."""

    prompt: str = "prompt"
    answer: str = "answer"
    verifier: str | None = None
    """None: the default verifier judges all rows."""
    metadata: str = "metadata"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRow:
    """One row, checked; nothing is templated or tokenised yet."""

    line: int
    """Line of a JSONL file or row of a Parquet file, from 1."""
    prompt: str | tuple[Mapping[str, str], ...]
    """A text, or chat messages of ``role`` and ``content``."""
    answer: str | None
    verifier: str | None
    metadata: Mapping[str, object]

    def canonical(self) -> bytes:
        """The row's content as bytes, whatever file format it came in; for fingerprints."""
        prompt = self.prompt if isinstance(self.prompt, str) else [dict(m) for m in self.prompt]
        content = [prompt, self.answer, self.verifier, dict(self.metadata)]
        return json.dumps(content, sort_keys=True, separators=(",", ":")).encode() + b"\n"


@dataclass(slots=True)
class RowProblems:
    """What is wrong with which rows; the first few are kept, all are counted."""

    path: Path
    what: str = "rows that cannot be used"
    count: int = 0
    shown: list[str] = field(default_factory=list[str])

    def add(self, line: int, message: str) -> None:
        """Note one row."""
        self.count += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(f"{self.path}:{line}: {message}")

    def raise_if_any(self) -> None:
        """Raise them all in one error.

        Raises:
            ConfigError: if a row was noted.
        """
        if not self.count:
            return
        more = self.count - len(self.shown)
        lines = [*self.shown, *([f"... and {more} more"] if more else [])]
        raise ConfigError(
            f"{self.count} {self.what} (nothing is dropped silently):\n" + "\n".join(lines),
            path=str(self.path),
            num_rows=self.count,
        )


def read_rows(path: Path, fields: FieldNames, problems: RowProblems) -> Iterator[SourceRow]:
    """Yield the good rows in file order; note the bad ones in ``problems``.

    Streams: memory does not grow with the file.

    Raises:
        ConfigError: if the file is missing, unreadable, or neither JSONL nor Parquet.
    """
    for line, raw in _raw_rows(path, fields, problems):
        try:
            yield _parse(line, raw, fields)
        except _BadRow as bad:
            problems.add(line, str(bad))


def count_rows(path: Path, fields: FieldNames) -> int:
    """Read the whole file and count its rows: what ``validate`` does, without a tokenizer.

    Raises:
        ConfigError: if the file or any row cannot be used, or there is no row.
    """
    problems = RowProblems(path)
    count = sum(1 for _ in read_rows(path, fields, problems))
    problems.raise_if_any()
    require_rows(path, count)
    return count


def require_rows(path: Path, count: int) -> None:
    """Refuse an empty file.

    Raises:
        ConfigError: if ``count`` is 0.
    """
    if not count:
        raise ConfigError(f"no prompts in {path}: the file has no rows", path=str(path))


class _BadRow(ValueError):
    pass


def _raw_rows(
    path: Path, fields: FieldNames, problems: RowProblems
) -> Iterator[tuple[int, Mapping[str, object]]]:
    suffix = path.suffix.lower()
    if suffix not in _JSONL | _PARQUET:
        raise ConfigError(
            f"prompts are read from {sorted(_JSONL | _PARQUET)}, not {path}", path=str(path)
        )
    if not path.is_file():
        raise ConfigError(f"prompt file {path} does not exist", path=str(path))
    try:
        if suffix in _JSONL:
            yield from _json_lines(path, problems)
        else:
            yield from _parquet_rows(path, fields)
    except OSError as exc:
        raise ConfigError(f"prompt file {path} cannot be read: {exc}", path=str(path)) from exc


def _json_lines(path: Path, problems: RowProblems) -> Iterator[tuple[int, Mapping[str, object]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line, parse_constant=_no_constant)
                if b"\\ud" in line:  # half a surrogate pair is JSON, but no text
                    json.dumps(row, ensure_ascii=False).encode()
            except UnicodeEncodeError as exc:
                problems.add(number, f"not text: {exc}")
                continue
            except ValueError as exc:
                problems.add(number, f"not JSON: {exc}")
                continue
            if isinstance(row, dict):
                yield number, cast(dict[str, object], row)
            else:
                problems.add(number, f"a row is an object, this is {_kind(row)}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _parquet_rows(path: Path, fields: FieldNames) -> Iterator[tuple[int, Mapping[str, object]]]:
    import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]  # ships no types
    from pyarrow.lib import ArrowInvalid  # pyright: ignore[reportUnknownVariableType]

    try:
        file: Any
        with cast(Any, pq.ParquetFile(path)) as file:
            known: set[str] = set(file.schema_arrow.names)
            wanted = (fields.prompt, fields.answer, fields.verifier, fields.metadata)
            columns = [name for name in wanted if name in known]
            number = 0
            for batch in file.iter_batches(_BATCH_ROWS, columns=columns, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except cast(Any, ArrowInvalid) as exc:
        raise ConfigError(f"{path} is not a readable Parquet file: {exc}", path=str(path)) from exc


def _parse(line: int, raw: Mapping[str, object], fields: FieldNames) -> SourceRow:
    return SourceRow(
        line=line,
        prompt=_prompt(raw, fields.prompt),
        answer=_answer(raw.get(fields.answer), fields.answer),
        verifier=_verifier(raw, fields.verifier),
        metadata=_metadata(raw.get(fields.metadata), fields.metadata),
    )


def _prompt(raw: Mapping[str, object], name: str) -> str | tuple[Mapping[str, str], ...]:
    if name not in raw:
        raise _BadRow(f"no field {name!r} (fields here: {sorted(raw)})")
    value = raw[name]
    if isinstance(value, str):
        if not value.strip():
            raise _BadRow(f"{name!r} is empty")
        return value
    messages = cast(list[object], value) if isinstance(value, list) else []
    if not messages:
        raise _BadRow(f"{name!r} is a text or a list of messages, this is {_kind(raw[name])}")
    return tuple(_message(item, name) for item in messages)


def _message(item: object, name: str) -> Mapping[str, str]:
    if isinstance(item, dict):
        message = cast(dict[str, object], item)
        role, content = message.get("role"), message.get("content")
        if len(message) == 2 and isinstance(role, str) and isinstance(content, str):
            return {"role": role, "content": content}
    raise _BadRow(f"a message in {name!r} is {{role, content}} in texts, this is {item!r:.80}")


def _answer(value: object, name: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise _BadRow(f"{name!r} is a text or a number, this is {_kind(value)}")


def _verifier(raw: Mapping[str, object], name: str | None) -> str | None:
    value = None if name is None else raw.get(name)
    if value is None or (isinstance(value, str) and value):
        return value
    raise _BadRow(f"{name!r} names a verifier, this is {_kind(value)}")


def _metadata(value: object, name: str) -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _BadRow(f"{name!r} is an object, this is {_kind(value)}")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise _BadRow(f"{name!r} holds what JSON cannot: {exc}") from exc
    return cast(dict[str, object], value)


def _kind(value: object) -> str:
    return f"{type(value).__name__} {value!r:.60}"
