"""Taking a run up again: one more try of a held step, or the next epoch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pydantic import ValidationError

from configs.load import LoadedRun
from configs.plan import Plan
from configs.run import RunSpec
from configs.shape import read_shape
from runtime.errors import ConfigError, StoreError
from runtime.launch.start import start_run
from runtime.launch.telling import end_of
from runtime.rundir import atomic
from runtime.rundir.chain import Chain
from runtime.rundir.control import Control
from runtime.rundir.layout import RunRoot
from runtime.session.status import look


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What came of asking for a run to go on."""

    how: Literal["complete", "running", "retried", "started", "attached"]
    """``retried``: the live session was asked for one more try; ``running``: it needed nothing."""
    attempt: int
    failure_id: str | None = None
    """Of the held step that is tried again."""
    notice: str = ""


def resume_run(root: RunRoot, loaded: LoadedRun | None = None, *, detached: bool) -> Resumed:
    """Let a run go on from where its directory says it stands. Idempotent.

    Args:
        root: the run.
        loaded: a run file with changes (more updates, another layout); None takes the one that is
            frozen in the root.
        detached: the next session goes on when nobody is attached.

    Raises:
        ConfigError: if there is nothing to resume, or the file is of another training.
        StoreError: if the frozen run file cannot be read.
    """
    status = look(root)
    if status.state == "complete":
        return Resumed(how="complete", attempt=status.attempt)
    if status.state == "unknown":
        raise ConfigError(f"no attempt was ever started in {root.path}: milepost run FILE")
    if status.stale is None and status.activity == "held" and status.failure is not None:
        Control(root).request_retry(status.failure.id)
        return Resumed(how="retried", attempt=status.attempt, failure_id=status.failure.id)
    if status.stale is None and status.activity in ("running", "resuming"):
        return Resumed(how="running", attempt=status.attempt)
    asked = loaded or frozen_run(root)
    if detached:
        launch = asked.spec.launch.model_copy(update={"detached": True})
        asked = replace(asked, spec=asked.spec.model_copy(update={"launch": launch}))
    # The one after what was looked at is asked for: two who resume a run at once make one attempt.
    has_ended = end_of(Chain(root).read(), status.attempt) is not None
    is_over = status.stale is not None or has_ended
    lost = status.attempt if is_over else None
    launched = start_run(asked, reason="resume", lost_attempt=lost)
    return Resumed(how=launched.how, attempt=launched.attempt, notice=launched.notice)


def frozen_run(root: RunRoot) -> LoadedRun:
    """The run file as the newest attempt froze it.

    Raises:
        StoreError: if it is missing, damaged or of another version.
        ConfigError: if the root was moved since.
    """
    try:
        spec = RunSpec.model_validate_json(atomic.read_bytes(root.run) or b"")
        plan = Plan.model_validate_json(atomic.read_bytes(root.plan) or b"")
    except ValidationError as error:
        raise StoreError(
            f"the frozen run file in {root.path} cannot be read: give the TOML file instead",
            root=str(root.path),
        ) from error
    if RunRoot.of(spec.output.root) != root:
        raise ConfigError(
            f"this run was made in {spec.output.root} and lies in {root.path}: move it back, or "
            "give the TOML file with the new output.root"
        )
    return LoadedRun(
        spec=spec, path=plan.run_file, text="", sets=(), warnings=(), shape=read_shape(spec.model)
    )
