"""The story of bringing a run to a scheduler: image, submission, watching, once more if need be."""

from __future__ import annotations

from pathlib import Path

from prefect import State, flow
from prefect.states import Completed

from blocks import BeakerAccount, ImageRegistry, RayCluster
from tasks.connections import sender_for
from tasks.launch import Run, back_off, ended, load, settle_image, submit, watch
from tasks.phases import enter_phase


@flow(name="launch", flow_run_name="{run_file.stem}", validate_parameters=True)
def launch(
    run_file: Path,
    sets: list[str] | None = None,
    build: str | None = None,
    registry: ImageRegistry | None = None,
    ray_cluster: RayCluster | None = None,
    beaker: BeakerAccount | None = None,
    attempt: int | None = None,
) -> State[str]:
    """Submit a run and see it through, attempt after attempt.

    Everything asked twice is found done: killing this flow, or running it twice, submits nothing
    twice. Cancelling it leaves the job alone; ``milepost stop`` ends the run.

    Args:
        run_file: the TOML run file, readable where the flow runs.
        sets: ``section.key=value`` replacements, as ``--set`` takes them.
        build: build the image of this checkout's commit into ``registry.host/name``.
        registry: credentials of the image registry; absent: this machine's docker config.
        ray_cluster: where to submit with ``launch.backend = "ray"``; absent: the run file's.
        beaker: the account for ``launch.backend = "beaker"``; absent: this machine's.
        attempt: the number that is asked for: submitted where nobody has it, followed where it is
            there, however it stands. Absent: the live attempt, or else the next one.
    """
    loaded = load(run_file, sets or [])
    run = Run(loaded=loaded, sender=sender_for(loaded.spec, registry, ray_cluster, beaker))
    enter_phase("Preparing")
    run = settle_image(run, build)
    launched = submit(run, lost_attempt=None if attempt is None else attempt - 1)
    enter_phase("Watching")
    while launched.how != "complete":
        watched = watch(run, launched.attempt)
        if watched.decision.what == "over":
            if watched.standing.kind != "succeeded":
                return ended(watched)
            break
        back_off(watched.decision.delay_s)
        launched = submit(run, reason=watched.decision.why, lost_attempt=watched.lost_attempt)
    return Completed(name="Complete", message=f"{loaded.spec.name}, attempt {launched.attempt}")
