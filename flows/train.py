"""The story of a run."""

from __future__ import annotations

from pathlib import Path

from prefect import State, flow
from prefect.states import Completed

from tasks.attach import attach, staying_attached
from tasks.closing import cache, export, finish, report
from tasks.ended import RunEnded
from tasks.evaluation import evaluate, submit_evaluations, submit_final
from tasks.opening import prepare, rendezvous
from tasks.phases import ended_state, enter_phase, stopping_when_cancelled
from tasks.segment import commit_checkpoint, train_segment


@flow(name="train", flow_run_name="{run_file.stem}", validate_parameters=True)
def train(run_file: Path, sets: list[str] | None = None, attempt: int | None = None) -> State[str]:
    """Train a run file to its end, from wherever it stands.

    Every step asks the run directory; killing this flow, or running it twice, changes nothing for
    the run. A cancellation of the flow run stops the run with a commit.

    Args:
        run_file: the TOML run file, readable where the flow runs.
        sets: ``section.key=value`` replacements, as ``--set`` takes them.
        attempt: the one that this flow shows; only one that is lost is followed by another. Absent:
            the live one, or else the next, which the flow starts.
    """
    run = attach(run_file, sets or [], attempt)
    try:
        with staying_attached(run), stopping_when_cancelled(run):
            enter_phase("Preparing")
            prepare(run)
            rendezvous(run)
            enter_phase("Training")
            for stretch in run.stretches():
                train_segment(run, stretch)
                commit_checkpoint(run, stretch)
                if run.has_background_evaluation and stretch.evaluations:
                    submit_evaluations(run, stretch, return_state=True)
                    continue
                for set_name in stretch.evaluations:
                    # A final evaluation that fails leaves the run complete, with the set
                    # outstanding.
                    evaluate(run, stretch, set_name, return_state=True)
            if run.loaded.spec.output.export_hf:
                export(run)
            if run.loaded.spec.output.compiler_cache is not None:
                cache(run, return_state=True)  # best effort
            finish(run)
            if run.has_background_evaluation:
                submit_final(run, return_state=True)
            report(run, return_state=True)  # a complete run is complete without its report
    except RunEnded as ended:
        return ended_state(ended)
    return Completed(name="Complete", message=f"{run.name} at update {run.end_update()}")
