"""A run's status as a JSON object, as a table, and as the next command to type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from runtime.rundir.layout import RunRoot
from runtime.session.status import Status, look, unreadable

_BRINGS = {"upload": "milepost upload", "evaluation": "milepost resubmit-evaluations"}
"""The command that brings what a complete run still owes; the first one that applies."""


def standing(root: RunRoot) -> Status:
    """Look at a run; a root that this host cannot read, or damaged history, is ``unknown``."""
    from runtime.rundir.records import ChainUnreadable

    try:
        return look(root)
    except ChainUnreadable as error:
        return unreadable(root, error.message)
    except OSError as error:
        return unreadable(root, f"{error.strerror}: {error.filename}")


def as_object(status: Status, argument: str) -> dict[str, Any]:
    """The object of ``--json``: stable names, more may be added."""
    return {
        "run": status.run,
        "state": status.state,
        "activity": status.activity,
        "stale": status.stale is not None,
        "attempt": status.attempt,
        "epoch": status.epoch,
        "update": status.update,
        "expected": status.expected.model_dump(),
        "seen": status.seen.model_dump(),
        "outstanding": list(status.outstanding),
        "last_checkpoint": status.last_checkpoint,
        "failure": status.failure.model_dump(mode="json") if status.failure else None,
        "next_check": status.next_check,
        "ended_by": status.ended_by,
        "step": status.step,
        "root": str(status.root.path),
        "training_digest": status.training_digest,
        "spec_digest": status.spec_digest,
        "evidence": [
            {"row": row.name, "filled": row.is_filled, "found": row.found, "missing": row.missing}
            for row in status.rows
        ],
        "processes": [asdict(process) for process in status.processes],
        "next_command": next_command(status, argument),
    }


def lines(status: Status, argument: str) -> Iterator[str]:
    """The status for a person: identity, evidence, processes, and what to type next."""
    yield f"{status.run}: {headline(status)}  ({status.root.path})"
    update = f"update {status.update}"
    if status.expected.updates:
        update += f" of {status.expected.updates}"
    checkpoint = "none" if status.last_checkpoint is None else str(status.last_checkpoint)
    yield f"  attempt {status.attempt}, epoch {status.epoch}, {update}, last commit {checkpoint}"
    if status.training_digest or status.spec_digest:
        training, spec = status.training_digest[:12] or "-", status.spec_digest[:12] or "-"
        yield f"  training {training}, run file {spec}"
    if status.state != "complete" and status.doing:
        yield f"  {status.step or '-'}: {status.doing}"
    yield ""
    width = max(len(row.name) for row in status.rows)
    for row in status.rows:
        yield f"  {'ok' if row.is_filled else '--'}  {row.name:<{width}}  {row.found}"
    if status.processes:
        yield "\nprocesses"
        for process in status.processes:
            alive = {True: "runs", False: "gone", None: "on another host"}[process.alive]
            yield f"  {process.role:<10}  {process.host} pid {process.pid}: {alive}"
    if status.failure is not None:
        yield f"\n{status.failure.error_class} in {status.failure.step}: {status.failure.message}"
    if status.next_check is not None:
        yield f"\nlook at: {status.next_check}"
    yield f"\nnext: {next_command(status, argument)}"


def headline(status: Status) -> str:
    """State and activity in a few words."""
    words = status.state + (f", {status.activity}" if status.activity else "")
    if status.state == "complete" and status.outstanding:
        words += f", {len(status.outstanding)} outstanding"
    return words + (", STALE" if status.stale is not None else "")


def next_command(status: Status, argument: str) -> str:
    """What a person types next."""
    if status.state == "complete":
        owed = {name.partition("/")[0] for name in status.outstanding}
        return next((line for kind, line in _BRINGS.items() if kind in owed), "milepost report") + (
            f" {argument}"
        )
    if status.state == "unknown":
        return f"milepost run {argument}" if argument.endswith(".toml") else "milepost run FILE"
    if status.stale is None and status.activity in ("running", "resuming"):
        return f"milepost watch {argument}"
    return f"milepost resume {argument}"
