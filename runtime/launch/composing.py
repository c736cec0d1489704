"""A submission made of a run file: pure, so that what is shown is what is sent."""

from __future__ import annotations

from typing import Literal

from configs.load import LoadedRun
from configs.plan import Plan
from configs.run import RunSpec
from runtime.launch.attempts import spec_digest
from runtime.launch.beaker_document import RESULTS
from runtime.launch.freezing import expected_counts, lease_for
from runtime.launch.submission import Payload, Submission
from runtime.rundir.attempt import AttemptFile, Claim
from runtime.rundir.layout import RunRoot


def scheduler_claim(backend: str, spec_json: str, plan: Plan) -> Claim:
    """The claim of an attempt that a scheduler runs: made of what is submitted, not of who submits.

    So a document is rendered the same twice, and two submitters of one thing hold one claim; the
    job's name then lets only one of them start it.
    """
    digest = spec_digest(spec_json)
    return Claim(
        launcher=backend,
        host="",
        boot_id="",
        pid=0,
        started=0.0,
        spec_digest=digest,
        training_digest=plan.training_digest,
        time=0.0,
        nonce=digest[:16],
    )


def submission_of(
    loaded: LoadedRun,
    plan: Plan,
    *,
    attempt: int,
    image: str | None,
    claim: Claim,
    reason: str = "start",
) -> Submission:
    """One attempt, ready to be rendered. Pure: the same arguments, the same bytes.

    Args:
        loaded: the run file.
        plan: of it.
        attempt: its number.
        image: None takes the run file's.
        claim: of the attempt.
        reason: for the epoch record.
    """
    spec = loaded.spec
    root = RunRoot.of(spec.output.root)
    order = AttemptFile(
        run=spec.name,
        training_digest=plan.training_digest,
        companion=companion(spec),
        env=dict(spec.launch.env),
        lease_s=lease_for(root, is_remote=True),
        expected=expected_counts(spec, plan),
        results=RESULTS if claim.launcher == "beaker" else None,
        ray=_ray_of(claim.launcher, spec.launch.replicas),
        reason=reason,
    )
    payload = Payload(
        root=root.path,
        attempt=attempt,
        run=spec.model_dump_json(),
        plan=plan.model_dump_json(),
        order=order,
        claim=claim,
    )
    return Submission(spec=spec, plan=plan, payload=payload, image=image or spec.launch.image)


def companion(spec: RunSpec) -> tuple[str, ...]:
    """The flow beside the guard, where the job knows a Prefect server to show itself on."""
    if "PREFECT_API_URL" not in spec.launch.env:
        return ()
    return ("python", "-m", "flows.cli", "train", "--attempt", "{attempt}")


def _ray_of(backend: str, replicas: int) -> Literal["own", "group", "job"]:
    if backend in ("ray", "kuberay"):
        return "job"
    return "group" if replicas > 1 else "own"
