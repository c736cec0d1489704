"""From a prompt file to its frozen copy: templated, tokenised and fingerprinted once.

What a run trains on is the copy in ``prepared/``; the author's file is read again only to see
whether it changed.
"""

# pyarrow ships no types: what comes out of it is Unknown, here and nowhere else.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from runtime.data.frozen import (
    ROWS_PER_GROUP,
    SCHEMA,
    FrozenFacts,
    PromptStore,
    facts_path,
    fingerprint_of,
    open_frozen,
    publish_file,
    sha256_of,
)
from runtime.data.rows import FieldNames, RowProblems, SourceRow, read_rows, require_rows
from runtime.data.tokenizer import (
    PromptTokenizer,
    encode_all,
    load_tokenizer,
    tokenizer_digest,
)
from runtime.errors import ConfigError, ContractViolation
from runtime.rundir.atomic import disk_full_as_error, draft, write_json

__all__ = [
    "FieldNames",
    "FrozenFacts",
    "PromptStore",
    "PromptTokenizer",
    "check_unchanged",
    "freeze",
    "load_tokenizer",
    "open_frozen",
    "require_fingerprint",
]

_ENCODED_AT_ONCE = 8 * ROWS_PER_GROUP


def freeze(
    source: Path,
    target: Path,
    *,
    tokenizer: PromptTokenizer,
    fields: FieldNames,
    max_prompt_tokens: int,
    default_verifier: str | None,
    apply_chat_template: bool = True,
) -> FrozenFacts:
    """Write the frozen copy of a prompt file, or find that it is there already.

    Idempotent: a copy of the same rows, tokenizer and template is kept as it is. The files
    appear whole (written beside, fsynced, renamed), the facts last. Memory does not grow with
    the number of rows.

    Args:
        source: JSONL or Parquet file.
        target: usually ``prepared/data.parquet``.
        tokenizer: of the model to be trained.
        fields: where a row keeps what.
        max_prompt_tokens: longest templated prompt.
        default_verifier: for rows that name none; None where nothing judges (OPD without rewards).
        apply_chat_template: False takes text as it is, with the tokenizer's own special tokens.

    Raises:
        ConfigError: if there is no row, a row cannot be used or is too long (all are listed), or
            ``target`` holds other data.
        DiskFull: if there was no space.
    """
    if facts_path(target).exists():
        facts = open_frozen(target).facts
        check_unchanged(facts, source, tokenizer, fields, apply_chat_template=apply_chat_template)
        return facts
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = draft(target)
    problems = RowProblems(source)
    too_long = RowProblems(source, f"prompts longer than max_prompt_tokens {max_prompt_tokens}")
    rows = read_rows(source, fields, problems)
    writing = _Writing(tokenizer, default_verifier, apply_chat_template, problems)
    try:
        with (
            disk_full_as_error(target),
            pq.ParquetWriter(partial, SCHEMA, compression="zstd", write_statistics=False) as writer,
        ):
            while chunk := list(islice(rows, _ENCODED_AT_ONCE)):
                table = writing.encode(chunk, max_prompt_tokens, too_long)
                for start in range(0, table.num_rows, ROWS_PER_GROUP):
                    writer.write_table(table.slice(start, ROWS_PER_GROUP))
        problems.raise_if_any()
        too_long.raise_if_any()
        require_rows(source, writing.count)
        facts = writing.facts(sha256_of(partial))
        publish_file(partial, target)
        write_json(facts_path(target), facts.model_dump(mode="json"), durable=True)
    finally:
        partial.unlink(missing_ok=True)
    return facts


class _Writing:
    """Turns chunks of rows into tables while it digests them."""

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        default_verifier: str | None,
        apply_chat_template: bool,
        problems: RowProblems,
    ) -> None:
        self.count = 0
        self._tokenizer = tokenizer
        self._default_verifier = default_verifier
        self._templated = apply_chat_template
        self._problems = problems
        self._rows_digest = hashlib.sha256()
        self._longest = 0
        self._verifiers: set[str] = set()

    def encode(
        self, chunk: Sequence[SourceRow], max_prompt_tokens: int, too_long: RowProblems
    ) -> pa.Table:
        texts = [self._render(row) for row in chunk]
        all_ids = encode_all(self._tokenizer, texts, add_special_tokens=not self._templated)
        verifiers = [row.verifier or self._default_verifier or "" for row in chunk]
        for row, ids in zip(chunk, all_ids, strict=True):
            self._rows_digest.update(row.canonical())
            self._longest = max(self._longest, len(ids))
            if len(ids) > max_prompt_tokens:
                too_long.add(row.line, f"{len(ids)} tokens")
            elif not ids:
                self._problems.add(row.line, "the prompt has no tokens")
        self.count += len(chunk)
        self._verifiers.update(verifiers)
        return pa.table(
            {
                "token_ids": pa.array(all_ids, pa.list_(pa.int32())),
                "text": [_readable(row) for row in chunk],
                "answer": pa.array([row.answer for row in chunk], pa.string()),
                "verifier": verifiers,
                "metadata": [json.dumps(row.metadata) for row in chunk],
            },
            schema=SCHEMA,
        )

    def facts(self, file_sha256: str) -> FrozenFacts:
        rows, tokens = self._rows_digest.hexdigest(), tokenizer_digest(self._tokenizer)
        template = _template_digest(self._tokenizer, self._templated)
        return FrozenFacts(
            fingerprint=fingerprint_of(rows, tokens, template),
            rows_digest=rows,
            tokenizer_digest=tokens,
            template_digest=template,
            num_prompts=self.count,
            longest_prompt_tokens=self._longest,
            verifiers=tuple(sorted(self._verifiers - {""})),
            file_sha256=file_sha256,
        )

    def _render(self, row: SourceRow) -> str:
        if self._templated:
            messages = (
                [{"role": "user", "content": row.prompt}]
                if isinstance(row.prompt, str)
                else [dict(message) for message in row.prompt]
            )
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        if isinstance(row.prompt, str):
            return row.prompt
        self._problems.add(row.line, "messages need data.apply_chat_template = true")
        return "-"


def check_unchanged(
    facts: FrozenFacts,
    source: Path,
    tokenizer: PromptTokenizer,
    fields: FieldNames,
    *,
    apply_chat_template: bool = True,
) -> None:
    """Refuse a data file, tokenizer or template that changed since it was frozen.

    A source that is gone is no change: the frozen copy is whole.

    Raises:
        ConfigError: naming what changed, with both digests.
    """
    found = {
        "tokenizer": (facts.tokenizer_digest, tokenizer_digest(tokenizer)),
        "chat template": (
            facts.template_digest,
            _template_digest(tokenizer, apply_chat_template),
        ),
    }
    if source.exists():
        problems, digest = RowProblems(source), hashlib.sha256()
        for row in read_rows(source, fields, problems):
            digest.update(row.canonical())
        problems.raise_if_any()
        found["rows"] = (facts.rows_digest, digest.hexdigest())
    changed = {what: pair for what, pair in found.items() if pair[0] != pair[1]}
    if changed:
        said = "; ".join(f"{what}: frozen {a}, now {b}" for what, (a, b) in changed.items())
        raise ConfigError(
            f"the data of this run changed since it was frozen ({source}): {said}. "
            "Put it back, or start another run",
            source=str(source),
            changed=sorted(changed),
        )


def require_fingerprint(committed: str, found: str) -> None:
    """The data a commit was made with must be the data that lies here.

    Raises:
        ContractViolation: naming both fingerprints.
    """
    if committed != found:
        raise ContractViolation(
            f"the commit was made with data {committed}, the frozen copy here is {found}",
            committed=committed,
            found=found,
        )


def _readable(row: SourceRow) -> str:
    if isinstance(row.prompt, str):
        return row.prompt
    return "\n".join(f"{m['role']}: {m['content']}" for m in row.prompt)


def _template_digest(tokenizer: PromptTokenizer, is_applied: bool) -> str:
    template = f"chat:{tokenizer.chat_template}" if is_applied else "raw"
    return hashlib.sha256(template.encode()).hexdigest()
