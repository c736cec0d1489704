"""The frozen copy of the data, read a prompt at a time.

``prepared/data.parquet`` holds one row a prompt in small row groups, so that reading one prompt
costs one group and memory stays flat whatever the number of prompts. Plain reads, no memory map:
mapped pages would count as memory of the session until the kernel takes them back. Beside it lies
``data.json``, written last: without these facts, or with others, the copy does not count.
"""

# pyarrow ships no types: what comes out of it is Unknown, here and nowhere else.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from runtime.data.samples import Prompt, PromptId
from runtime.errors import PartialWrite
from runtime.rundir.atomic import fsync_folder, point

ROWS_PER_GROUP = 128
_CACHED_BYTES = 32 << 20
SCHEMA = pa.schema(
    [
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("answer", pa.string()),
        pa.field("verifier", pa.string(), nullable=False),
        pa.field("metadata", pa.string(), nullable=False),
    ]
)


class FrozenFacts(BaseModel):
    """What is known of a frozen copy; stored beside it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    fingerprint: str
    """SHA-256 over rows, tokenizer, template; what commits and resumes compare."""
    rows_digest: str
    tokenizer_digest: str
    template_digest: str
    """Of the chat template, or of the word ``raw`` where none is applied."""
    num_prompts: int = Field(ge=1)
    longest_prompt_tokens: int
    verifiers: tuple[str, ...]
    """Names of all verifiers the rows ask for, sorted."""
    file_sha256: str
    """Of the Parquet file; looked at whenever it is opened."""

    @model_validator(mode="after")
    def _fingerprint_follows(self) -> Self:
        expected = fingerprint_of(self.rows_digest, self.tokenizer_digest, self.template_digest)
        if self.fingerprint != expected:
            raise ValueError("the fingerprint does not follow from its parts")
        return self


def fingerprint_of(rows_digest: str, tokenizer_digest: str, template_digest: str) -> str:
    """SHA-256 that changes with any of the three."""
    parts = f"milepost.data.v1/{rows_digest}/{tokenizer_digest}/{template_digest}"
    return hashlib.sha256(parts.encode()).hexdigest()


def facts_path(path: Path) -> Path:
    """Where the facts of a frozen copy lie."""
    return path.with_suffix(".json")


class PromptStore:
    """All prompts, the row groups used last in memory. Thread-safe; close it when done."""

    def __init__(self, path: Path, facts: FrozenFacts, file: pq.ParquetFile) -> None:
        self.path = path
        self.facts = facts
        self._file = file
        self._lock = threading.Lock()
        self._groups: OrderedDict[int, pa.Table] = OrderedDict()
        self._cached_bytes = 0

    def __len__(self) -> int:
        return self.facts.num_prompts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def fingerprint(self) -> str:
        """What commits and resumes compare."""
        return self.facts.fingerprint

    def prompt(self, prompt_id: PromptId) -> Prompt:
        """The prompt with this identity; the same content in every pass.

        Raises:
            IndexError: if there is no such row.
            PartialWrite: if its part of the file is damaged.
        """
        if not 0 <= prompt_id.index < len(self):
            raise IndexError(f"prompt {prompt_id} of {len(self)} in {self.path}")
        group, offset = divmod(prompt_id.index, ROWS_PER_GROUP)
        with self._lock:
            table = self._group(group)
        row: dict[str, Any] = {
            name: column[offset].as_py()
            for name, column in zip(table.column_names, table.columns, strict=True)
        }
        return Prompt(
            id=prompt_id,
            token_ids=tuple(row["token_ids"]),
            text=row["text"],
            answer=row["answer"],
            verifier=row["verifier"],
            metadata=json.loads(row["metadata"]),
        )

    def prompts(self, pass_: int = 0) -> Iterator[Prompt]:
        """All prompts in file order."""
        for index in range(len(self)):
            yield self.prompt(PromptId(pass_, index))

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._groups.clear()
            self._file.close()

    def _group(self, group: int) -> pa.Table:
        if group in self._groups:
            self._groups.move_to_end(group)
            return self._groups[group]
        try:
            table = self._file.read_row_group(group, use_threads=False)
        except (OSError, pa.ArrowException) as exc:
            raise PartialWrite(
                f"frozen data {self.path} is damaged in row group {group}: {exc}",
                path=str(self.path),
            ) from exc
        self._groups[group] = table
        self._cached_bytes += table.nbytes
        while self._cached_bytes > _CACHED_BYTES and len(self._groups) > 1:
            _, oldest = self._groups.popitem(last=False)
            self._cached_bytes -= oldest.nbytes
        return table


def open_frozen(path: Path) -> PromptStore:
    """Open a frozen copy after reading all of it once (about a second a gigabyte).

    Raises:
        PartialWrite: if the copy or its facts are missing, or damaged in any byte.
    """
    try:
        facts = FrozenFacts.model_validate_json(facts_path(path).read_bytes())
        found = sha256_of(path)
    except (OSError, ValidationError) as exc:
        raise PartialWrite(f"frozen data {path} cannot be read: {exc}", path=str(path)) from exc
    if found != facts.file_sha256:
        raise PartialWrite(
            f"frozen data {path} is not what was written: SHA-256 {found}, "
            f"its facts say {facts.file_sha256}",
            path=str(path),
        )
    return PromptStore(path, facts, pq.ParquetFile(path))


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish_file(partial: Path, target: Path) -> None:
    """Make a written file durable under its name; it is there whole or not at all."""
    with partial.open("rb") as file:
        point("fsync", partial)
        os.fsync(file.fileno())
    point("replace", target)
    partial.replace(target)
    fsync_folder(target.parent)
