"""What a person reads off the flow run: its phase, a held step, a cancellation answered."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import TerminationSignal
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled, Running

from runtime.rundir.failure import Failure
from runtime.session.stopping import ask_to_stop
from tasks.display import SERVER_TROUBLE, show
from tasks.ended import RunEnded
from tasks.handle import RunHandle


def enter_phase(name: str) -> None:
    """Show ``name`` as the state of the flow run, at the latest when the server answers again.

    Every Running state raises Prefect's run count, so flows with named phases have no retries.
    """
    flow_run_id = flow_run.id
    if not flow_run_id:
        return

    def set_state() -> None:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(UUID(str(flow_run_id)), Running(name=name), force=True)

    show("the phase", set_state)


def show_held(run: RunHandle, failure: Failure) -> None:
    """Say that a step is held, what to look at, and how to let it go."""
    enter_phase("Held")
    get_run_logger().warning(
        "%s is held: %s\nlook at: %s\nthen: milepost resume %s",
        failure.step,
        failure.message,
        failure.next_check,
        run.root.path,
    )


def ended_state(ended: RunEnded) -> State[str]:
    """The flow run's state for a run that ended on the way: a stopped run is no failed one.

    Raises:
        RunEnded: if the run failed; Prefect then shows Failed with the message.
    """
    activity = ended.detail["activity"]
    if activity is None:
        raise ended
    return Cancelled(name=str(activity).capitalize(), message=ended.message)


@contextmanager
def stopping_when_cancelled(run: RunHandle) -> Generator[None]:
    """Turn a cancellation of the flow run into ``milepost stop``; nothing else stops a session.

    Killing a flow, losing the server or restarting a worker leaves the run alone.
    """
    try:
        yield
    except TerminationSignal:
        if _is_being_cancelled():
            ask_to_stop(run.root, "stop", by="prefect cancellation", time_s=time.time())
        raise


def heed_cancellation(run: RunHandle) -> None:
    """Stop the run where the flow run was cancelled and nobody could tell this process.

    Prefect's own watch for cancellations does not outlive a server that is away for a minute.
    The flow then ends as the run does; a run that stops already is left to it.
    """
    if flow_run.id and _is_being_cancelled():
        ask_to_stop(run.root, "stop", by="prefect cancellation", time_s=time.time())


def _is_being_cancelled() -> bool:
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(str(flow_run.id))).state
    except (*SERVER_TROUBLE, ValueError):
        return False  # no answer is no order
    return state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED)
