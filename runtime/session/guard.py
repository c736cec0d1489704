"""The guard: the one process that owns a run directory for an attempt.

``python -m runtime.session.guard ATTEMPT_DIR [--gated]``. It takes the lease, reaps what a
predecessor left on this host, appends the epoch record, starts the session, and writes the end
after the session has exited. It knows neither Ray nor torch: what kills them leaves it standing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from runtime import faults
from runtime.clock import Clock, SystemClock
from runtime.errors import FencedError, Interrupted, OwnedError, StoreError
from runtime.rundir import atomic, enter, history, results, workflow
from runtime.rundir.attempt import (
    EXIT_COMPLETE,
    EXIT_FAILED,
    EXIT_NOT_OWNER,
    EXIT_STOPPED,
    EXIT_TERMINATED,
    AttemptFile,
    GuardFile,
    Outcome,
    TurnedAway,
)
from runtime.rundir.chain import Chain, lease_duration
from runtime.rundir.control import Control
from runtime.rundir.gate import GATED, was_let_go
from runtime.rundir.journal import Journal
from runtime.rundir.layout import AttemptDir
from runtime.rundir.lease import RunLease, again_s
from runtime.rundir.processes import (
    HostBoot,
    ProcessRegistry,
    free_environment,
    owned_environment,
    reap,
)
from runtime.rundir.records import Activity, EpochRecord, Record
from runtime.session import deadman
from runtime.session.child import SessionProcess
from runtime.session.deadman import Switch
from runtime.session.ending import Ending, show
from runtime.session.ends import EndedBy
from runtime.session.filling import fill_empty_root
from runtime.session.outcome import KilledBy
from runtime.session.scratch import remove_scratch, run_key
from runtime.session.succession import Choice, Choose, newest_valid, reason
from runtime.telemetry.events import Event

DRIVER = (sys.executable, "-m", "runtime.session.driver")


class Guard:
    """One ownership of a run, from lease to end record."""

    def __init__(
        self,
        attempt: AttemptDir,
        *,
        here: HostBoot | None = None,
        clock: Clock | None = None,
        choose: Choose = newest_valid,
    ) -> None:
        """Read what the attempt asks for.

        Args:
            attempt: its folder.
            here: this host and boot; processes of others are not reaped.
            clock: of this process.
            choose: which commit a new epoch restores; a StoreError ends the epoch at once.

        Raises:
            StoreError: if ``attempt.json`` is missing or cannot be read.
        """
        self._attempt = attempt
        self._root = attempt.root
        self._spec = AttemptFile.read(attempt)
        self._here = here or HostBoot.here()
        self._clock = clock or SystemClock()
        self._choose = choose
        self._registry = ProcessRegistry(attempt.processes)
        self._control = Control(self._root)
        self._chain = Chain(self._root)
        self._journal = Journal(attempt, epoch=0, role="guard", clock=self._clock)
        self._is_terminated = False
        self._has_owned = False

    def terminate(self) -> None:
        """Ask the session to end within its grace; safe to call from a signal handler."""
        self._is_terminated = True

    def run(self) -> int:
        """Own the run until its session has exited; returns the exit status.

        Raises:
            ChainUnreadable: if history cannot be read; nothing was started.
            DiskFull: if not even the epoch record could be written; nothing was started.
        """
        self._root.create()
        # A scheduler may start the job of an attempt again.
        self._attempt.turned_away.unlink(missing_ok=True)
        records = self._chain.read()
        lease = RunLease(
            self._root,
            duration_s=lease_duration(records) or self._spec.lease_s,
            clock=self._clock,
            sleep=self._sleep,
        )
        try:
            lease.acquire(records, self._here)
        except (OwnedError, Interrupted) as error:
            return self._turned_away(error.message)
        try:
            return self._own(lease)
        except FencedError as error:
            if not self._has_owned:
                return self._turned_away(error.message)
            return self._say(error.message, EXIT_NOT_OWNER)
        finally:
            lease.release()

    # -- the life of an ownership ---------------------------------------------------------------

    def _own(self, lease: RunLease) -> int:
        if faults.plan is not None:
            faults.plan.reach("guard.lease")
        records = self._chain.read()
        before = history.newest_epoch(records)
        if before is not None and history.is_complete(records):
            # The last guard may have died between the end record and its last view.
            view = workflow.current(self._root, records, now=self._clock.time())
            self._show(view, before.epoch)
            atomic.sweep(self._root.path)
            remove_scratch(run_key(self._root.path))
            return self._say("the run is complete", EXIT_COMPLETE)
        if before is not None:
            if (status := self._left_as_it_is(before, records)) is not None:
                return status
            self._reap(before.epoch)
            deadman.sweep(self._root.attempt(before.attempt))
        try:
            choice, problem = self._choose(self._root, records), None
        except StoreError as error:
            # The epoch that finds nothing to restore undoes nothing, and ends with what was found.
            choice, problem = Choice(commit=history.newest_commit(records)), error
        epoch = self._take_epoch(choice, lease.duration_s)
        self._has_owned = True
        self._journal = Journal(self._attempt, epoch=epoch.epoch, role="guard", clock=self._clock)
        self._journal.set_reserve()
        self._journal.append(Event.EPOCH_TAKEN, restored=epoch.restored, reason=epoch.reason)
        if problem is not None:
            return _status(self._ending().of_unrestorable(epoch, problem))
        with Switch() as switch:
            self._announce(epoch, lease, switch)
            session = self._start_session(epoch.epoch)
            try:
                returncode, killed_by = self._watch(session, lease, epoch)
            except BaseException:
                session.kill()
                raise
        self._reap(epoch.epoch)
        if returncode is None:
            return EXIT_NOT_OWNER
        # A session that was killed leaves its Ray's folder; no one may come after it.
        remove_scratch(run_key(self._root.path))
        return _status(self._ending().of_session(self._present(epoch), returncode, killed_by))

    def _left_as_it_is(self, before: EpochRecord, records: Sequence[Record]) -> int | None:
        """Exit status of who was started late, or again, and would undo what became of the run.

        Numbers of attempts are of one root: one that was filled from an object store has epochs of
        attempts that never were in it, and they may have any number.
        """
        newer = self._root.attempt(before.attempt)
        if newer.number > self._attempt.number and newer.attempt.exists():
            return self._turned_away(f"attempt {newer.number} has owned the run since")
        end = history.current_end(records)
        if end is None or newer.number != self._attempt.number:
            return None
        if end.state == "failed" or end.ended_by == EndedBy.SIGTERM:
            return None
        # A scheduler starts again what left with another status than 0; a person did not ask.
        said = f"it has ended as was asked ({end.ended_by}), and is taken up by another attempt"
        return self._say(said, EXIT_STOPPED)

    def _present(self, taken: EpochRecord) -> int:
        """Our present epoch: the one taken, or a later one that our session began for us.

        Raises:
            FencedError: if a newer owner exists.
        """
        newest = history.newest_epoch(self._chain.read())
        if newest is None or newest.owner != taken.owner:
            raise FencedError(f"epoch {taken.epoch} is over: a newer owner exists")
        return newest.epoch

    def _take_epoch(self, choice: Choice, lease_s: float) -> EpochRecord:
        if faults.plan is not None:
            faults.plan.reach("guard.epoch")
        records = self._chain.seen
        before, restored = history.newest_epoch(records), choice.commit
        return self._chain.append(
            EpochRecord(
                epoch=before.epoch + 1 if before else 1,
                time=self._clock.time(),
                attempt=self._attempt.number,
                host=self._here.host,
                pid=os.getpid(),
                boot_id=self._here.boot_id,
                started=enter.started(os.getpid()) or 0.0,
                reason=reason(self._spec.reason, records, choice),
                restored=restored.policy if restored else None,
                restored_seq=restored.seq if restored else None,
                lease_s=None if records else lease_s,
            )
        )

    def _announce(self, epoch: EpochRecord, lease: RunLease, switch: Switch) -> None:
        if faults.plan is not None:
            faults.plan.reach("guard.announce")
        self._registry.enter("guard", epoch=epoch.epoch)
        device, inode = lease.identity
        guard = GuardFile(
            epoch=epoch.epoch,
            host=self._here.host,
            boot_id=self._here.boot_id,
            pid=epoch.pid,
            started=epoch.started,
            fifo=str(switch.path),
            lease=str(self._root.lease),
            lease_s=lease.duration_s,
            lease_device=device,
            lease_inode=inode,
        )
        atomic.write_bytes(self._attempt.guard, guard.encode())
        # Last words of an earlier epoch of this attempt are not this one's.
        self._attempt.outcome.unlink(missing_ok=True)
        self._attempt.epoch(epoch.epoch).mkdir(exist_ok=True)
        view = workflow.rebuild(self._root, self._chain.seen, now=self._clock.time())
        self._show(view.model_copy(update={"activity": _activity(epoch)}), epoch.epoch)

    def _start_session(self, epoch: int) -> SessionProcess:
        if faults.plan is not None:
            faults.plan.reach("guard.session")
        env = owned_environment(
            {**os.environ, **self._spec.env}, attempt_dir=self._attempt.path, epoch=epoch
        )
        argv = [*(self._spec.session or DRIVER), str(self._attempt.path)]
        session = SessionProcess(
            argv, env=env, registry=self._registry, log=self._attempt.session_log
        )
        self._journal.append(Event.SESSION_STARTED, pid=session.pid)
        if self._spec.companion:
            # It attaches on its own and may come and go: it is no process of the attempt.
            with suppress(OSError), self._attempt.path.joinpath("companion.log").open("ab") as log:
                subprocess.Popen(
                    [
                        part.replace("{attempt}", str(self._attempt.path))
                        for part in self._spec.companion
                    ],
                    env=free_environment(os.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        return session

    def _watch(
        self, session: SessionProcess, lease: RunLease, taken: EpochRecord
    ) -> tuple[int | None, KilledBy | None]:
        """Wait for the session; (None, None) once the lease is lost and the session killed."""
        tick_s = min(0.2, again_s(lease.duration_s))
        spent_s: float | None = None
        last = self._clock.monotonic()
        killed_by: KilledBy | None = None
        while True:
            if faults.plan is not None:
                faults.plan.reach("guard.watch")
            # The exit is looked at before any deadline: after a freeze it may have come long ago.
            if (returncode := session.wait(tick_s)) is not None:
                # The session watches the lease too, and may have left before we had looked.
                if reason := lease.confirm():
                    return self._lost(session, reason)
                if spent_s is not None and returncode == -signal.SIGTERM:
                    killed_by = "sigterm"
                return returncode, killed_by
            now = self._clock.monotonic()
            reason = lease.lost()
            epoch = 0
            try:
                epoch = self._present(taken)
            except FencedError as error:
                reason = error.message
            if reason:
                return self._lost(session, reason)
            if killed_by is not None:
                continue
            if self._is_terminated and spent_s is None:
                self._journal.append(Event.ATTEMPT_PREEMPTED, grace_s=self._spec.grace_s)
                session.terminate()
                spent_s = 0.0
            elif spent_s is not None:
                # A freeze counts as one tick: the session was frozen with us, or had no need of us.
                spent_s += min(now - last, 2 * tick_s)
            stop = self._control.stop_request(epoch)
            if stop is not None and stop.mode == "now":
                killed_by = "stop_now"
            elif spent_s is not None and spent_s > self._spec.grace_s:
                killed_by = "sigterm"
            if killed_by is not None:
                session.kill()
            last = now

    def _lost(self, session: SessionProcess, reason: str) -> tuple[None, None]:
        session.kill()
        session.wait(10.0)
        self._say(f"ownership lost, the session was ended: {reason}", EXIT_NOT_OWNER)
        return None, None

    def _reap(self, up_to_epoch: int) -> None:
        reaped = reap(self._root, here=self._here, up_to_epoch=up_to_epoch)
        for pid, role in reaped.killed:
            self._say(f"reaped {role}, pid {pid}", 0)
        for pid, role in reaped.remaining:
            self._say(f"{role}, pid {pid}, does not die: its host needs a look", 0)
        # Half files of whoever died while writing; nobody reads them, and nobody else deletes them.
        atomic.sweep(self._root.path)

    def _ending(self) -> Ending:
        return Ending(self._attempt, self._chain, self._journal, clock=self._clock)

    def _show(self, view: workflow.Workflow, epoch: int) -> None:
        show(self._root, view, epoch=epoch, clock=self._clock)

    def _turned_away(self, reason: str) -> int:
        """Say it in our own folder alone: who does not own the run writes nothing of it."""
        said = TurnedAway(
            pid=os.getpid(), host=self._here.host, reason=reason, time=self._clock.time()
        )
        # Without it the attempt is waited for longer, and nothing else.
        with suppress(OSError, StoreError):
            atomic.write_bytes(self._attempt.turned_away, said.encode(), durable=True)
        return self._say(reason, EXIT_NOT_OWNER)

    def _sleep(self, seconds: float) -> None:
        if self._is_terminated:
            raise Interrupted("asked to end while waiting for the lease")
        time.sleep(seconds)

    def _say(self, message: str, status: int) -> int:
        sys.stderr.write(f"milepost guard, attempt {self._attempt.number}: {message}\n")
        return status


def main(argv: Sequence[str]) -> int:
    """Run the guard of one attempt; SIGTERM and SIGINT ask its session to end."""
    attempt = AttemptDir(Path(argv[1]).absolute())
    guard = Guard(attempt)

    def on_signal(signum: int, frame: FrameType | None) -> None:
        guard.terminate()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if argv[2:] == [GATED] and not was_let_go():
        sys.stderr.write(f"milepost guard, attempt {attempt.number}: its launcher is gone\n")
        return EXIT_NOT_OWNER
    fill_empty_root(attempt)
    status = guard.run()
    if status != EXIT_NOT_OWNER:
        keep_results(attempt)
    return status


def keep_results(attempt: AttemptDir) -> None:
    """Leave the story where the scheduler keeps results, if the attempt has such a folder.

    The end of the attempt stands in the chain by now, so no disk that fails here changes its exit
    status: that is said on standard error, and nothing is raised.
    """
    try:
        folder = AttemptFile.read(attempt).results
        if folder is not None:
            results.keep(attempt, Path(folder))
    except (OSError, StoreError) as error:
        sys.stderr.write(f"milepost guard, attempt {attempt.number}: results not kept: {error}\n")


def _status(outcome: Outcome) -> int:
    if outcome.state == "complete":
        return EXIT_COMPLETE
    if outcome.state == "failed":
        return EXIT_FAILED
    return EXIT_TERMINATED if outcome.ended_by == EndedBy.SIGTERM else EXIT_STOPPED


def _activity(epoch: EpochRecord) -> Activity:
    return "running" if epoch.restored is None else "resuming"


if __name__ == "__main__":
    sys.exit(main(sys.argv))
