"""From a run file to a running attempt; what the command line, the flow and the tests all call."""

from __future__ import annotations

from configs.availability import unavailable
from configs.inputs import absent_inputs
from configs.load import LoadedRun
from configs.plan import make_plan
from configs.run import RunSpec
from runtime.errors import ConfigError, UnavailableFeature
from runtime.launch.attempts import Launch
from runtime.launch.freezing import expected_counts
from runtime.launch.local import LocalLaunch
from runtime.launch.sending import sender_of
from runtime.launch.submitting import submit_run
from runtime.rundir.layout import RunRoot


def start_run(
    loaded: LoadedRun,
    *,
    reason: str = "start",
    lost_attempt: int | None = None,
    lease_s: float | None = None,
) -> Launch:
    """Start the run, attach to its live attempt, or find it complete. Idempotent.

    Args:
        loaded: the run file with its ``--set`` values.
        reason: for the epoch record, when an attempt is started.
        lost_attempt: the attempt that was found lost.
        lease_s: of a fresh run; None takes what suits its disk.

    Raises:
        UnavailableFeature: if the file asks for machinery this version lacks; nothing was started.
        LaunchRefused: if a check before submission fails; nothing was sent.
        ConfigError: if the output root belongs to another training, or a first start here would
            find no such input.
        ServiceUnavailable: if a scheduler did not answer; asking again is safe.
    """
    missing = unavailable(loaded.spec)
    if missing:
        raise UnavailableFeature("; ".join(missing))
    if loaded.spec.launch.backend != "local":
        return submit_run(loaded, sender_of(loaded.spec), reason=reason, lost_attempt=lost_attempt)
    root = RunRoot.of(loaded.spec.output.root)
    if not root.path.exists():  # later it may be complete, or have its own copies
        _require_inputs(loaded.spec)
    plan = make_plan(loaded)
    return LocalLaunch().start(
        root,
        loaded.spec.model_dump_json(),
        plan.training_digest,
        run=loaded.spec.name,
        plan_json=plan.model_dump_json(),
        env=dict(loaded.spec.launch.env),
        expected=expected_counts(loaded.spec, plan),
        reason=reason,
        lost_attempt=lost_attempt,
        lease_s=lease_s,
    )


def _require_inputs(spec: RunSpec) -> None:
    absent = absent_inputs(spec)
    if absent:
        named = "; ".join(f"{field}: {path} does not exist" for field, path in absent.items())
        raise ConfigError(f"{named}; `milepost validate` looks at every input")
