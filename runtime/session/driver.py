"""The session process: ``python -m runtime.session.driver ATTEMPT_DIR``, started by the guard.

Its last words go to ``outcome.json``; the guard turns them into the ``end`` record.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.to_thread

from runtime import faults
from runtime.errors import RetryBy
from runtime.rundir.attempt import Outcome
from runtime.rundir.chain import Chain
from runtime.rundir.failure import Failure, choose_cause
from runtime.rundir.history import committed_update
from runtime.session import cluster, deadman
from runtime.session.caching import SessionCaches
from runtime.session.context import Context
from runtime.session.ends import End
from runtime.session.scratch import scratch_folder
from runtime.session.signals import Signals
from runtime.session.view import SessionView
from runtime.telemetry import log
from runtime.telemetry.events import Event
from runtime.telemetry.recorder import Recorder
from runtime.telemetry.sinks import WandbSettings

EXIT_OK = 0
EXIT_FAILED = 1
_WATCH_S = 0.2


def main(argv: list[str]) -> int:
    """Run the session of one attempt; the exit status is 0 unless the run failed."""
    context = Context.open(Path(argv[1]))
    deadman.watch(context.attempt.path, epoch=context.epoch)
    log.configure(
        log.log_path(context.root.path, context.attempt.number, "session"),
        run=context.spec.name,
        attempt=context.attempt.number,
        role="session",
        epoch=context.epoch,
    )
    outcome = anyio.run(_run, context, backend_options={"use_uvloop": True})
    if faults.plan is not None:
        faults.plan.reach("session.outcome")
    outcome.write(context.attempt)
    return EXIT_FAILED if outcome.state == "failed" else EXIT_OK


async def _run(context: Context) -> Outcome:
    """The session, whatever comes of it, as an outcome."""
    view = SessionView.of(context)
    recorder = Recorder(
        context.root.path, context.owner, clock=context.clock, tracking=_tracking(context)
    ).start()
    try:
        end = await _watched(context, view, recorder)
    except Exception as error:
        failure = _failure(error, view, context)
        log.get_logger().error(Event.RUN_FAILED, **failure.model_dump(mode="json"))
        log.get_logger().error(Event.SESSION_ENDED, exc_info=error)
        outcome = Outcome(
            epoch=context.epoch,
            state="failed",
            ended_by="failure",
            update=_reached(context, view),
            failure=failure,
        )
    else:
        outcome = _outcome(context, view, end)
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(recorder.close)
    return outcome


async def _watched(context: Context, view: SessionView, recorder: Recorder) -> End:
    # Ray reads its environment when it is imported, so what imports it comes after.
    folder = scratch_folder(context.run_key, context.epoch)
    if context.order.ray != "job":
        cluster.set_environment(folder)
    else:
        cluster.keep_job_environment()
    caches = SessionCaches.of(context, recorder, folder.with_name(f"{folder.name}.caches"))
    if caches is not None:
        os.environ.update(caches.environment)
    from runtime.session.assembly import session_of
    from runtime.session.ground import Ground

    signals = Signals.of(
        context.root,
        epoch=context.epoch,
        detached=context.plan.detached,
        detach_grace_s=context.spec.launch.detach_grace,
        clock=context.clock,
        over_time=context.is_over_time,
    )
    ends: list[End] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(view.beat_for_ever)
        tasks.start_soon(_listen, signals)
        ground = Ground(
            context=context,
            scratch=folder,
            recorder=recorder,
            view=view,
            signals=signals,
            tasks=tasks,
            caches=caches,
        )
        with anyio.CancelScope() as opening:
            is_open = anyio.Event()
            tasks.start_soon(_leave_unopened, signals, opening, is_open, ends)
            async with session_of(ground) as session:
                is_open.set()
                # What stands now lives as long as the session: half a million objects of libraries,
                # which every full collection would go through, 0.3 s each time.
                gc.collect()
                gc.freeze()
                ends.append(await session.run())
        if caches is not None and ends:
            view.doing("cache")
            await caches.publish(lambda: signals.is_terminated)
        await anyio.to_thread.run_sync(view.write)
        tasks.cancel_scope.cancel()
    return ends[0]


async def _leave_unopened(
    signals: Signals, opening: anyio.CancelScope, is_open: anyio.Event, ends: list[End]
) -> None:
    """Preparing may take minutes: whoever stops it meanwhile need not wait for the session."""
    while not is_open.is_set():
        end = signals.end_requested()
        # An end that owes an export needs the session to open first.
        if end is not None and not end.is_complete:
            ends.append(end)
            opening.cancel()
            return
        await anyio.sleep(_WATCH_S)


async def _listen(signals: Signals) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
        async for number in received:
            signals.on_signal(number)


def _outcome(context: Context, view: SessionView, end: End) -> Outcome:
    return Outcome(
        epoch=context.epoch,
        state="complete" if end.is_complete else "training",
        activity=None if end.is_complete else end.activity,
        ended_by=end.by.value,
        update=_reached(context, view),
        failure=view.failure if end.activity == "parked" else None,
    )


def _reached(context: Context, view: SessionView) -> int:
    """The last update made; a session that did not open stands where history does."""
    return max(view.update, committed_update(Chain(context.root).read()))


def _failure(error: Exception, view: SessionView, context: Context) -> Failure:
    """The cause among everything that was raised together, for whoever can still retry it.

    What the session itself, or its producer, retries has got past them when it arrives here: the
    next epoch may try, and the same failure twice without a commit ends that.
    """
    now = context.clock.time()
    cause = choose_cause([Failure.of(e, step=view.step, time=now) for e in _leaves(error)])
    if cause.retry in (RetryBy.GROUP, RetryBy.SESSION):
        return cause.model_copy(update={"retry": RetryBy.TASK})
    return cause


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error


def _tracking(context: Context) -> WandbSettings | None:
    tracking = context.spec.tracking
    if tracking.mode == "disabled":
        return None
    return WandbSettings(
        mode=tracking.mode,
        project=tracking.project,
        name=context.spec.name,
        entity=tracking.entity,
        group=tracking.group or context.spec.name,
        config=context.plan.spec,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv))
