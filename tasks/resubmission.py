"""Walking known runs for evaluations that are owed, and showing what became of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.settings import PREFECT_UI_URL

from runtime.clock import SystemClock
from runtime.errors import RunError
from runtime.evaluation.receipts import EvaluationReceipt
from runtime.evaluation.submission import Row, Rules, submit_due
from runtime.rundir.known import known_roots, run_folders
from runtime.rundir.layout import RunRoot
from tasks.display import only_display
from tasks.jobs import DeploymentJobs

TABLE = "evaluations"


@task(name="find runs")
def find_runs(runs: Sequence[Path]) -> list[RunRoot]:
    """Output roots to walk: those named, or all in the folders where runs are known to lie."""
    found = list(known_roots(list(runs) or run_folders()))
    get_run_logger().info("%d runs: %s", len(found), ", ".join(str(root.path) for root in found))
    return found


@task(name="submit due", task_run_name="submit due of {root.path.name}")
def submit_run(root: RunRoot, *, force: bool, first_delay_s: float) -> list[Row]:
    """Submit what is due of one run; a run that cannot be read costs the others nothing."""
    rules = Rules(by=f"resubmission {flow_run.id}", force=force, first_delay_s=first_delay_s)
    try:
        return submit_due(root, DeploymentJobs(), rules, clock=SystemClock())
    except (RunError, OSError) as error:
        get_run_logger().error("%s: %s", root.path, error)
        return []


@task(name="show table")
def show_table(rows: list[Row]) -> str:
    """The table of this pass, and one sentence about it."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.verdict] = counts.get(row.verdict, 0) + 1
    said = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    with only_display("the table of evaluations"):
        create_table_artifact(table=[_as_line(row) for row in rows], key=TABLE, description=said)
    return said or "nothing is owed"


def _as_line(row: Row) -> dict[str, object]:
    receipt = row.receipt
    said = f"{row.verdict}: {row.why}"
    if receipt is None:
        run, state = row.root.path.name, "damaged"
        return {
            "run": run, "update": row.update, "set": row.folder.name, "kind": "", "state": state,
            "tries": "", "how tries ended": "", "next try": "", "pass": said, "link": "",
        }  # fmt: skip
    return {
        "run": receipt.request.run,
        "update": row.update,
        "set": row.folder.name,
        "kind": receipt.request.kind,
        "state": receipt.state,
        "tries": len(receipt.tries),
        "how tries ended": "; ".join(_ends(receipt)),
        "next try": _when(receipt.next_try_at),
        "pass": said,
        "link": _link(row.job),
    }


def _ends(receipt: EvaluationReceipt) -> Iterator[str]:
    """Why it took more than one try, in their order."""
    for try_ in receipt.tries:
        if try_.result is None:
            yield f"{try_.number}: under way"
        else:
            message = try_.result.error.message[:200] if try_.result.error else ""
            yield f"{try_.number}: {try_.result.reason or message or try_.result.state}"


def _when(moment: float | None) -> str:
    return "" if moment is None else datetime.fromtimestamp(moment, UTC).strftime("%H:%M:%S UTC")


def _link(job: str | None) -> str:
    """Markdown, as the page renders cells: a whole address would push the column out of sight."""
    base = PREFECT_UI_URL.value()
    if job is None or not base:
        return job or ""
    return f"[flow run]({base}/runs/flow-run/{job})"
