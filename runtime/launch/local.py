"""The local backend: the guard is a detached process of this host."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from runtime import faults
from runtime.clock import Clock, SystemClock
from runtime.launch.attempts import Launch, spec_digest, win_or_attach
from runtime.launch.freezing import freeze, lease_for
from runtime.rundir import atomic, enter
from runtime.rundir.attempt import AttemptFile, Started
from runtime.rundir.claims import LOCAL, make_claim
from runtime.rundir.gate import GATED, open_gate
from runtime.rundir.layout import AttemptDir, RunRoot
from runtime.rundir.processes import HostBoot, free_environment
from runtime.rundir.workflow import Counts

GUARD = (sys.executable, "-m", "runtime.session.guard")


class LocalLaunch:
    """Starts guards on this host. The only backend that a flow may begin a next epoch with."""

    def __init__(self, *, clock: Clock | None = None, guard: Sequence[str] = GUARD) -> None:
        self._clock = clock or SystemClock()
        self._guard = tuple(guard)

    def start(
        self,
        root: RunRoot | Path | str,
        spec_json: str,
        training_digest: str,
        *,
        run: str,
        plan_json: str = "{}",
        env: Mapping[str, str] | None = None,
        expected: Counts | None = None,
        grace_s: float = 60.0,
        lease_s: float | None = None,
        session: Sequence[str] = (),
        companion: Sequence[str] = (),
        reason: str = "start",
        lost_attempt: int | None = None,
    ) -> Launch:
        """Start an attempt, or attach to the live one of the same training. Idempotent.

        Args:
            root: the output root; made if it does not exist.
            spec_json: the resolved run file as JSON; frozen into the attempt.
            training_digest: of that run file.
            run: the run's name.
            plan_json: the plan as JSON; frozen into the attempt.
            env: added to the session's environment; never a secret.
            expected: what the whole run is expected to make, for the workflow view.
            grace_s: from SIGTERM to SIGKILL of the session.
            lease_s: None takes 30 s on a local disk, 120 s on a shared one; chain/0 overrules it.
            session: command of the session instead of the driver's, for tests.
            companion: command beside the session, see ``AttemptFile``.
            reason: why, for the epoch record.
            lost_attempt: the attempt that ``ensure`` answered ``Lost`` about.

        Raises:
            ConfigError: if the run is made by another training digest.
            DiskFull: if there was no space.
        """
        at = root if isinstance(root, RunRoot) else RunRoot.of(root)
        claim = make_claim(
            launcher=LOCAL,
            spec_digest=spec_digest(spec_json),
            training_digest=training_digest,
            time=self._clock.time(),
        )
        launch, attempt = win_or_attach(
            at,
            claim,
            spec_json,
            clock=self._clock,
            here=HostBoot.here(),
            lost_attempt=lost_attempt,
        )
        if attempt is not None:
            order = AttemptFile(
                run=run,
                training_digest=training_digest,
                session=tuple(session),
                companion=tuple(companion),
                env=dict(env or {}),
                lease_s=lease_for(at, is_remote=False) if lease_s is None else lease_s,
                grace_s=grace_s,
                expected=expected or Counts(),
                reason=reason,
            )
            self._begin(attempt, spec_json, plan_json, order)
        return launch

    def _begin(
        self, attempt: AttemptDir, spec_json: str, plan_json: str, order: AttemptFile
    ) -> None:
        """Write a won attempt down and start its guard, which begins once it is written down too.

        Whoever dies on the way leaves an attempt that is known to be over, and no process.
        """
        process: subprocess.Popen[bytes] | None = None
        try:
            if faults.plan is not None:
                faults.plan.reach("launch.freeze")
            freeze(attempt, spec_json, plan_json, order)
            if faults.plan is not None:
                faults.plan.reach("launch.spawn")
            process = self._spawn(attempt)
            _record(attempt, process)
        except BaseException:
            if process is not None:
                with process:
                    process.kill()
            # A claim whose launcher lives on would read as "about to start" for ever.
            attempt.started.unlink(missing_ok=True)
            attempt.claim.unlink(missing_ok=True)
            raise
        open_gate(process)
        # A zombie would look alive to the lease: whoever started the guard collects it.
        threading.Thread(target=process.wait, name="guard-exit", daemon=True).start()
        if faults.plan is not None:
            faults.plan.reach("launch.started")

    def _spawn(self, attempt: AttemptDir) -> subprocess.Popen[bytes]:
        with attempt.guard_log.open("ab") as log:
            return subprocess.Popen(
                [*self._guard, str(attempt.path), GATED],
                env=free_environment(os.environ),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def _record(attempt: AttemptDir, process: subprocess.Popen[bytes]) -> None:
    """Name the guard that waits to be let go, for whoever asks whether it lives."""
    if faults.plan is not None:
        faults.plan.reach("launch.record")
    started = Started(pid=process.pid, started=enter.started(process.pid))
    atomic.write_bytes(attempt.started, started.encode())
    if faults.plan is not None:
        faults.plan.reach("launch.go")
