"""Collections as files, one row a sample, and as what the trainer is given."""

# pyarrow ships no types: what comes out of it is Unknown, here and nowhere else.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from runtime.data.frozen import publish_file
from runtime.data.routed import RoutedExperts, RouterShape
from runtime.data.samples import Collection, Group, Prompt, PromptId, Sample, Span
from runtime.data.teacher import TeacherScores
from runtime.errors import ContractViolation, PartialWrite
from runtime.policy import PolicyId
from runtime.rundir.atomic import disk_full_as_error, draft, point
from runtime.trainer import protocol as trainer

_KEY = b"milepost"
_NO_TEACHER = TeacherScores(0, b"", b"").arrays(0)
_SCHEMA = pa.schema(
    [
        # Whose sample it is. Prompt columns repeat within a group; compression makes that cheap.
        pa.field("group", pa.int32(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("pass", pa.int32(), nullable=False),
        pa.field("index", pa.int64(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("answer", pa.string()),
        pa.field("verifier", pa.string(), nullable=False),
        pa.field("metadata", pa.string(), nullable=False),
        # What came back.
        pa.field("text", pa.string(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("finish", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float64()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.int8())),
        # Policies as they are written everywhere (e3.u55), spans by their ends.
        pa.field("prefill", pa.string(), nullable=False),
        pa.field("span_ends", pa.list_(pa.int32()), nullable=False),
        pa.field("span_policies", pa.list_(pa.string()), nullable=False),
        # Choices of experts, one byte (or two) each, and layers, top k and experts.
        pa.field("routed", pa.binary()),
        pa.field("router", pa.list_(pa.int32())),
        # A served teacher's log-probs, float32, and the ids they are of, int32, place by place.
        pa.field("teacher_top_k", pa.int32()),
        pa.field("teacher_logprobs", pa.binary()),
        pa.field("teacher_ids", pa.binary()),
    ]
)


class CollectionFacts(BaseModel):
    """What the file says of the collection as a whole; stored in its footer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    id: int
    taken_at: str
    """Policy id."""
    num_groups: int
    num_samples: int


def write_collection(path: Path, collection: Collection) -> None:
    """Write one collection; the file appears whole, a file of the same name is replaced.

    Raises:
        ContractViolation: if a group is empty, or spans do not begin where the last one ended.
        DiskFull: if there was no space.
    """
    rows = [row for g, group in enumerate(collection.groups) for row in _rows(g, group)]
    if any(not group.samples for group in collection.groups):
        raise ContractViolation(f"collection {collection.id} holds a group without samples")
    facts = CollectionFacts(
        id=collection.id,
        taken_at=str(collection.taken_at),
        num_groups=len(collection.groups),
        num_samples=len(rows),
    )
    table = pa.Table.from_pylist(
        rows, schema=_SCHEMA.with_metadata({_KEY: facts.model_dump_json().encode()})
    )
    partial = draft(path)
    try:
        with disk_full_as_error(path):
            point("write", partial)
            pq.write_table(table, partial, compression="zstd", write_page_checksum=True)
            publish_file(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_collection(path: Path) -> Collection:
    """Read what ``write_collection`` wrote; equal to it in every field.

    Raises:
        PartialWrite: if the file is missing, cut off, damaged, or of an unknown schema.
    """
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        facts = CollectionFacts.model_validate_json((table.schema.metadata or {})[_KEY])
        groups = tuple(_groups(table.to_pylist()))
        collection = Collection(id=facts.id, groups=groups, taken_at=PolicyId.parse(facts.taken_at))
    # Damage shows up anywhere between the footer and the last field.
    except (OSError, pa.ArrowException, ValidationError, ValueError, KeyError, TypeError) as exc:
        raise PartialWrite(
            f"collection file {path} cannot be read: {type(exc).__name__}: {exc}", path=str(path)
        ) from exc
    if (len(groups), table.num_rows) != (facts.num_groups, facts.num_samples):
        raise PartialWrite(
            f"collection file {path} holds {len(groups)} groups of {table.num_rows} samples, "
            f"its footer says {facts.num_groups} of {facts.num_samples}",
            path=str(path),
        )
    return collection


def to_sequences(
    collection: Collection, advantages: Sequence[Sequence[float]]
) -> tuple[trainer.Sequence, ...]:
    """The samples as the trainer sees them, siblings side by side, in the order of the groups.

    Args:
        collection: with rewards, or without any (OPD); then every group counts as equal.
        advantages: one for each sample, group by group.

    Raises:
        ContractViolation: if the advantages do not fit, or only some samples have rewards.
    """
    if [len(a) for a in advantages] != [len(g.samples) for g in collection.groups]:
        raise ContractViolation(
            f"collection {collection.id}: advantages of {[len(a) for a in advantages]} samples "
            f"for groups of {[len(g.samples) for g in collection.groups]}"
        )
    return tuple(
        sequence
        for g, (group, of_group) in enumerate(zip(collection.groups, advantages, strict=True))
        for sequence in _sequences(g, group, of_group)
    )


def _sequences(
    position: int, group: Group, advantages: Sequence[float]
) -> Iterator[trainer.Sequence]:
    is_equal = all(s.reward is None for s in group.samples) or group.is_equal
    prompt = group.prompt.token_ids
    for sample, advantage in zip(group.samples, advantages, strict=True):
        num_tokens = len(sample.token_ids)
        of_teacher = _NO_TEACHER if sample.teacher is None else sample.teacher.arrays(num_tokens)
        yield trainer.Sequence(
            tokens=np.array(prompt + sample.token_ids, np.int32),
            prompt_len=len(prompt),
            logprobs=np.array(sample.logprobs, np.float32),
            mask=np.ones(num_tokens, np.float32)
            if sample.loss_mask is None
            else np.array(sample.loss_mask, np.float32),
            advantage=advantage,
            span_ends=np.array([span.end for span in sample.spans], np.int32),
            span_updates=np.array([span.policy.update for span in sample.spans], np.int32),
            prefill_update=sample.prefill.update,
            group=position,
            is_equal=is_equal,
            teacher_logprobs=of_teacher[0],
            teacher_ids=of_teacher[1],
        )


def _rows(position: int, group: Group) -> Iterator[dict[str, Any]]:
    prompt = group.prompt
    of_group = {
        "group": position,
        "attempt": group.attempt,
        "pass": prompt.id.pass_,
        "index": prompt.id.index,
        "prompt": prompt.text,
        "prompt_ids": prompt.token_ids,
        "answer": prompt.answer,
        "verifier": prompt.verifier,
        "metadata": json.dumps(dict(prompt.metadata)),
    }
    for number, sample in enumerate(group.samples):
        ends = [span.end for span in sample.spans]
        if [span.start for span in sample.spans] != [0, *ends][:-1]:
            raise ContractViolation(
                f"group {prompt.id}, sample {number}: spans with gaps or overlaps"
            )
        yield {**of_group, "sample": number, **_of_sample(sample, ends)}


def _of_sample(sample: Sample, ends: list[int]) -> dict[str, Any]:
    return {
        "text": sample.text,
        "reward": sample.reward,
        "finish": sample.finish,
        "token_ids": sample.token_ids,
        "logprobs": sample.logprobs,
        "loss_mask": sample.loss_mask,
        "prefill": str(sample.prefill),
        "span_ends": ends,
        "span_policies": [str(span.policy) for span in sample.spans],
        "routed": None if sample.routed is None else sample.routed.data,
        "router": None if sample.routed is None else _router_row(sample.routed.shape),
        "teacher_top_k": None if sample.teacher is None else sample.teacher.top_k,
        "teacher_logprobs": None if sample.teacher is None else sample.teacher.logprobs,
        "teacher_ids": None if sample.teacher is None else sample.teacher.ids,
    }


def _groups(rows: list[dict[str, Any]]) -> Iterator[Group]:
    for _, of_group in groupby(rows, key=lambda row: row["group"]):
        samples = list(of_group)
        first = samples[0]
        yield Group(
            prompt=Prompt(
                id=PromptId(first["pass"], first["index"]),
                token_ids=tuple(first["prompt_ids"]),
                text=first["prompt"],
                answer=first["answer"],
                verifier=first["verifier"],
                metadata=json.loads(first["metadata"]),
            ),
            attempt=first["attempt"],
            samples=tuple(_sample(row) for row in samples),
        )


def _sample(row: dict[str, Any]) -> Sample:
    ends: list[int] = row["span_ends"]
    policies = map(PolicyId.parse, row["span_policies"])
    spans = zip([0, *ends][:-1], ends, policies, strict=True)
    return Sample(
        token_ids=tuple(row["token_ids"]),
        logprobs=tuple(row["logprobs"]),
        spans=tuple(Span(*span) for span in spans),
        prefill=PolicyId.parse(row["prefill"]),
        finish=row["finish"],
        text=row["text"],
        reward=row["reward"],
        loss_mask=None if row["loss_mask"] is None else tuple(row["loss_mask"]),
        routed=_routed(row),
        teacher=_teacher(row),
    )


def _router_row(shape: RouterShape) -> list[int]:
    return [shape.layers, shape.top_k, shape.experts]


def _routed(row: dict[str, Any]) -> RoutedExperts | None:
    if row.get("routed") is None:  # files of before choices were recorded have no such column
        return None
    layers, top_k, experts = row["router"]
    shape = RouterShape(layers=layers, top_k=top_k, experts=experts)
    return RoutedExperts(row["routed"], shape)


def _teacher(row: dict[str, Any]) -> TeacherScores | None:
    if row.get("teacher_top_k") is None:  # files of before teachers were served have no such column
        return None
    return TeacherScores(row["teacher_top_k"], row["teacher_logprobs"], row["teacher_ids"])
