"""Completion evidence: the rows that must all be filled before a run counts as finished."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from configs.run import RunSpec
from configs.schedule import commit_due, evaluation_due
from runtime.checkpoints.bucket import store_name
from runtime.checkpoints.copied import UPLOAD, is_copied, read_copied
from runtime.checkpoints.files import locate
from runtime.errors import StoreError
from runtime.evaluation.reading import standing_result
from runtime.launch.attempts import spec_digest
from runtime.policy import PolicyId
from runtime.publication.decision import Decision
from runtime.rundir import atomic, history, workflow
from runtime.rundir.attempt import Claim
from runtime.rundir.claims import read_claim
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import Record
from runtime.rundir.workflow import Counts, Workflow
from runtime.session.evidence import receipt_of
from runtime.session.steps import Step, StepKind

Records = tuple[Record, ...]

_PARQUET = b"PAR1"
_NAMED = 5
"""Missing files of one kind that are named; the rest are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the evidence table."""

    name: str
    is_filled: bool
    found: str
    """What fills it, or what there is so far."""
    missing: tuple[str, ...] = ()
    """Names of what is outstanding; a row can be empty for want of an end alone."""


def completion_rows(
    root: RunRoot,
    records: Records,
    view: Workflow,
    *,
    expected: Counts,
    seen: Counts,
    left: Sequence[str] = (),
) -> tuple[Row, ...]:
    """Every row, in the order it is shown.

    Args:
        root: the run.
        records: the whole chain.
        view: of the newest epoch.
        expected: what the run makes, at its actual end where it has one.
        seen: what there is evidence of.
        left: processes of the newest attempt that still run on this host.
    """
    spec = read_spec(root)
    return (
        _exits(records, left),
        _launch(root, view.attempt),
        _state(root, records, view),
        _counts(root, records, view, spec, expected, seen),
        _audit(root, records, view, spec),
        _weights(root, records, view),
        *_copy(root, records, spec),
    )


def read_spec(root: RunRoot) -> RunSpec | None:
    """The frozen run file of the newest attempt; None where it cannot be read."""
    data = atomic.read_bytes(root.run)
    try:
        return RunSpec.model_validate_json(data) if data is not None else None
    except ValidationError:
        return None


def expected_counts(root: RunRoot, records: Records, view: Workflow) -> Counts:
    """What the run makes; of a complete one, what it owes at the update it actually ended with."""
    end = history.current_end(records)
    spec = read_spec(root)
    if end is None or end.state != "complete" or spec is None:
        return view.expected
    boundaries = _boundaries(spec, end.update)
    evaluated = {u for u in boundaries if evaluation_due(spec, u)}
    if spec.evaluation.final:
        evaluated.add(end.update)
    return Counts(
        updates=end.update,
        checkpoints=len({u for u in boundaries if commit_due(spec, u)} | {end.update} - {0}),
        evaluations=len(evaluated) * len(spec.evaluation.sets),
        exports=int(spec.output.export_hf),
    )


def _boundaries(spec: RunSpec, last: int) -> range:
    per_collection = spec.core.updates_per_collection
    return range(per_collection, last + 1, per_collection)


def _is_evaluated(root: RunRoot, records: Records, update: int, set_name: str) -> bool:
    try:
        return standing_result(root, records, update=update, set_name=set_name) is not None
    except StoreError:
        return False  # a damaged receipt proves nothing


def _exits(records: Records, left: Sequence[str]) -> Row:
    end = history.current_end(records)
    epoch = history.newest_epoch(records)
    if epoch is None:
        return Row(name="exits", is_filled=False, found="no attempt has owned the run")
    where = f"attempt {epoch.attempt}, epoch {epoch.epoch} on {epoch.host}"
    if end is None:
        return Row(name="exits", is_filled=False, found=f"{where}: no end record")
    if end.state != "complete":
        return Row(name="exits", is_filled=False, found=f"{where}: ended by {end.ended_by}")
    if left:
        return Row(
            name="exits",
            is_filled=False,
            found=f"{where}: processes are left",
            missing=tuple(f"exit of {process}" for process in left),
        )
    return Row(name="exits", is_filled=True, found=f"{where}: 0, ended by {end.ended_by}")


def _launch(root: RunRoot, attempt: int) -> Row:
    name = "launch receipt"
    if attempt < 1:
        return Row(name=name, is_filled=False, found="none", missing=(name,))
    try:
        claim = read_claim(root.attempt(attempt))
        run = atomic.read_bytes(root.attempt(attempt).run) or b""
        is_same = spec_digest(run.decode()) == claim.spec_digest
    except (StoreError, ValueError) as error:
        return Row(name=name, is_filled=False, found=str(error), missing=(name,))
    found = (
        f"attempt {attempt} by {claim.launcher}, {_whose(claim)}"
        f"spec {claim.spec_digest[:12]}, training {claim.training_digest[:12]}"
    )
    if not is_same:
        found += "; the frozen run file is another one"
    return Row(name=name, is_filled=is_same, found=found, missing=() if is_same else (name,))


def _whose(claim: Claim) -> str:
    """The launching process; a scheduler's attempt is known by what it is of, not who sent it."""
    return f"pid {claim.pid} on {claim.host}, " if claim.pid else ""


def _state(root: RunRoot, records: Records, view: Workflow) -> Row:
    is_complete = history.is_complete(records)
    stored = workflow.read(root)
    found = view.state + (f", {view.activity}" if view.activity else "")
    if stored is None and records:
        found += "; workflow.json is missing or damaged, rebuilt from the chain"
    elif stored is not None and (stored.epoch, stored.state) != (view.epoch, view.state):
        found += "; workflow.json is older than the chain"
    return Row(name="state", is_filled=is_complete, found=found)


def _counts(
    root: RunRoot,
    records: Records,
    view: Workflow,
    spec: RunSpec | None,
    expected: Counts,
    seen: Counts,
) -> Row:
    found = ", ".join(
        f"{name} {getattr(seen, name)}" + (f" of {wanted}" if wanted else "")
        for name, wanted in expected.model_dump().items()
    )
    if not history.is_complete(records):
        return Row(name="counts", is_filled=False, found=found)
    missing = tuple(_missing_steps(root, records, view, spec, expected, seen))
    return Row(name="counts", is_filled=not missing, found=found, missing=missing)


def _missing_steps(
    root: RunRoot,
    records: Records,
    view: Workflow,
    spec: RunSpec | None,
    expected: Counts,
    seen: Counts,
) -> Iterator[str]:
    end = history.current_end(records)
    last = end.update if end else 0
    if seen.updates < expected.updates:
        yield f"segment/{expected.updates}"
    # Any later commit meets a checkpoint: one that a full disk prevented was made good by the next.
    if history.committed_update(records) < last:
        yield f"checkpoint/{last}"
    if spec is None:
        # What is required cannot be read any more; the session's own list is the next best.
        yield from view.outstanding
        return
    for update in (*_boundaries(spec, last - 1), last):
        is_final = update == last and spec.evaluation.final
        if not is_final and not evaluation_due(spec, update):
            continue
        for name, asked in spec.evaluation.sets.items():
            is_required = is_final if asked.required is None else asked.required
            if is_required and not _is_evaluated(root, records, update, name):
                yield f"evaluation/{update}/{name}"
    if spec.output.export_hf:
        step = Step(kind=StepKind.EXPORT, update=last)
        if receipt_of(step, root, records, view) is None:
            yield str(step)


def _audit(root: RunRoot, records: Records, view: Workflow, spec: RunSpec | None) -> Row:
    collections = _collections(root)
    per_collection = spec.core.updates_per_collection if spec else 1
    made = set(range(1, view.update // per_collection + 1))
    problems: list[str] = []
    if not _has_content(root.prepared / "receipt.json"):
        problems.append("prepared")
    problems += _named("rollouts", sorted(made - collections), 6)
    problems += _commit_problems(root, records)
    if not any(_has_content(path) for path in root.contracts.glob("*.jsonl")):
        problems.append("contracts")
    if not _has_content(root.driver_timing):
        problems.append("driver_timing.jsonl")
    if (spec is None or spec.tracking.mode != "disabled") and not _has_entries(root.wandb):
        problems.append("wandb")
    found = f"rollouts of {len(made & collections)} of {len(made)} collections"
    found += (
        f"; missing: {', '.join(problems)}" if problems else "; every file present and readable"
    )
    is_over = history.is_complete(records)
    return Row(
        name="audit files",
        is_filled=is_over and not problems,
        found=found,
        missing=tuple(problems) if is_over else (),
    )


def _collections(root: RunRoot) -> set[int]:
    """Collections with a whole file of any epoch."""
    return {
        int(path.name.partition("-")[0])
        for path in root.rollouts.glob("[0-9]*-e*.parquet")
        if _is_parquet(path)
    }


def _named(what: str, missing: list[int], digits: int) -> Iterator[str]:
    for number in missing[:_NAMED]:
        yield f"{what}/{number:0{digits}d}"
    if len(missing) > _NAMED:
        yield f"{what}: {len(missing) - _NAMED} more"


def _commit_problems(root: RunRoot, records: Records) -> Iterator[str]:
    commit = history.newest_commit(records)
    if commit is None:
        yield "checkpoints"
        return
    for entry in commit.files:
        path = locate(root, commit, entry.name)
        if not path.is_file() or path.stat().st_size != entry.size:
            yield str(path.relative_to(root.path))


def _weights(root: RunRoot, records: Records, view: Workflow) -> Row:
    name = "weights, engines"
    newest = _last_published(root.path / "publications.jsonl")
    if newest is None:
        missing = (name,) if history.is_complete(records) else ()
        return Row(name=name, is_filled=False, found="nothing was published", missing=missing)
    found = f"{newest.policy} verified on {len(newest.verified)} engines"
    if newest.failed:
        found += f", {len(newest.failed)} failed"
    if not history.is_complete(records):
        return Row(name=name, is_filled=False, found=found)
    policy = PolicyId.parse(newest.policy)
    is_last = policy.update == view.update and history.is_standing(records, policy)
    missing = () if is_last else (f"publication/{view.update}",)
    found += "; the session closed its engines and left with 0"
    return Row(name=name, is_filled=is_last, found=found, missing=missing)


def _copy(root: RunRoot, records: Records, spec: RunSpec | None) -> Iterator[Row]:
    """Whether the newest commit lies in the object store too; no row where none is asked for."""
    commit = history.newest_commit(records)
    if spec is None or spec.checkpoint.upload is None or commit is None:
        return
    upload, copied = spec.checkpoint.upload, read_copied(root)
    is_newest = is_copied(copied, commit, upload=upload)
    if copied is None:
        found = f"no copy in {upload}"
    else:
        undone = "" if history.is_standing(records, copied.policy) else ", undone since,"
        found = f"{copied.policy}{undone} whole in {copied.detail.get('store')}"
        found += "" if is_newest else f", {commit.policy} is not in {store_name(upload)} yet"
    is_over = history.is_complete(records)
    missing = (f"{UPLOAD}/{commit.update}",) if is_over and not is_newest else ()
    yield Row(name="copy", is_filled=is_over and is_newest, found=found, missing=missing)


def _last_published(path: Path) -> Decision | None:
    """The last publication that was verified; torn and damaged lines are skipped."""
    lines = (atomic.read_bytes(path) or b"").splitlines()
    for line in reversed(lines):
        try:
            decision = Decision.model_validate_json(line)
        except ValidationError:
            continue
        if decision.kind == "publication" and decision.outcome == "published":
            return decision
    return None


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _has_entries(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        if file.read(4) != _PARQUET:
            return False
        file.seek(-4, 2)
        return file.read(4) == _PARQUET
