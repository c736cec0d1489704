"""Background evaluations: one try as a deployment run, and the pass that submits what is owed."""

from __future__ import annotations

from pathlib import Path

from prefect import State, flow
from prefect.states import Completed

from tasks.evaluation import make_result, submit_freed
from tasks.resubmission import find_runs, show_table, submit_run


@flow(name="evaluate", flow_run_name="{root.name} {policy} {set_name} #{number}")
def evaluate(root: Path, policy: str, set_name: str, number: int) -> State[str]:
    """Evaluate one set at one policy of a run, on engines of its own.

    A result that stands is never computed again; items of an earlier try are not repeated.

    Args:
        root: the run's output root, on a mount that this machine shares with it.
        policy: policy id, such as e1.u40.
        set_name: the evaluation set.
        number: which try, as its claim says.
    """
    result = make_result(root, policy, set_name, number)
    submit_freed(root, return_state=True)  # what waited for a place in flight
    return Completed(name="Complete", message=f"{result.state}, mean {result.metrics.get('mean')}")


@flow(name="resubmit", flow_run_name="resubmit evaluations")
def resubmit(
    runs: list[Path] | None = None, force: bool = False, first_delay_s: float = 600.0
) -> State[str]:
    """Submit the evaluations that runs still owe; two of these at once submit each once.

    Args:
        runs: output roots, or folders that hold some; none: `runs` and the folders of
            MILEPOST_RUNS.
        force: set cap, delay and repeated failures aside.
        first_delay_s: before the first resubmission of an evaluation; it doubles with each.
    """
    rows = [
        row
        for root in find_runs(runs or [])
        for row in submit_run(root, force=force, first_delay_s=first_delay_s)
    ]
    return Completed(name="Complete", message=show_table(rows))
