"""A submitted run beside a terminal: the launch flow in a thread, the run's bar above it."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

import typer

from configs.load import LoadedRun
from flows.commands._attached import quiet_prefect
from flows.commands.run import errors_said, named, say_standing
from runtime.errors import RunError
from runtime.launch.attempts import Launch
from runtime.launch.driving import see_through
from runtime.launch.submitting import is_reachable
from runtime.rundir import workflow
from runtime.rundir.control import StopMode
from runtime.rundir.layout import RunRoot
from runtime.session.stopping import ask_to_stop
from runtime.telemetry.progress import RunProgress

_POLL_S = 0.5


def follow_submitted(
    loaded: LoadedRun, build: str | None, *, detach: bool, as_json: bool, debug: bool
) -> NoReturn:
    """Submit and follow, or with ``detach`` only submit; exits as ``status`` does."""
    root = RunRoot.of(loaded.spec.output.root)
    with errors_said(as_json=as_json, debug=debug):
        if detach:
            launched = submit_once(loaded, build)
            if not as_json:
                typer.echo(f"{launched.how}: attempt {launched.attempt}  {launched.notice}")
        else:
            Submitted(loaded, build, asked_of(loaded)).follow()
    say_standing(root, named(loaded), as_json=as_json)


def asked_of(loaded: LoadedRun) -> int:
    """The attempt that this command is about, decided before anything is submitted.

    Raises:
        RunError: if its scheduler is not known, or history cannot be read.
    """
    from runtime.launch.sending import sender_of
    from runtime.launch.submitting import asked_attempt

    return asked_attempt(loaded, sender_of(loaded.spec))


def submit_once(loaded: LoadedRun, build: str | None) -> Launch:
    """Settle the image and submit, without a flow.

    Raises:
        RunError: whatever stands in the way; the same call again is safe.
    """
    from runtime.launch.image.settling import settle
    from runtime.launch.sending import sender_of
    from runtime.launch.submitting import submit_run

    settled = settle(loaded.spec, sender_of(loaded.spec), build=build)
    return submit_run(loaded, settled.sender)


def is_as_asked(state: Any) -> bool:
    """A flow ended with its run complete, or stopped as somebody asked; nothing is left to follow.

    Prefect's own "Cancelled" is an end of the flow alone.
    """
    return state.is_completed() or (state.is_cancelled() and state.name != "Cancelled")


@dataclass(slots=True)
class Submitted:
    """One submitted run in one terminal. The run needs neither it nor Prefect."""

    loaded: LoadedRun
    build: str | None
    attempt: int
    """What is asked for, by the flow and by whoever goes on where the flow breaks."""
    _interrupts: int = field(default=0, init=False)
    _error: BaseException | None = field(default=None, init=False)

    def follow(self) -> None:
        """Show the run until its flow ends; Ctrl-C once stops it with a commit, twice at once.

        Raises:
            RunError: how the flow ended, if no attempt followed or nothing could be submitted.
        """
        root = RunRoot.of(self.loaded.spec.output.root)
        can_read = is_reachable(self.loaded, root)
        signal.signal(signal.SIGINT, self._interrupted)
        flow = threading.Thread(target=self._run_flow, name="flow", daemon=True)
        flow.start()
        with RunProgress() as progress:
            while flow.is_alive():
                view = workflow.read(root) if can_read else None
                if view is not None:
                    progress.show(view.model_dump(mode="json"))
                time.sleep(_POLL_S)
        if isinstance(self._error, RunError):
            raise self._error
        if self._error is not None:
            # The flow is a display: whatever breaks it, the run is seen through.
            typer.echo(f"the launch flow: {type(self._error).__name__}: {self._error}", err=True)
            see_through(
                self.loaded,
                build=self.build,
                attempt=self.attempt,
                say=lambda line: typer.echo(line, err=True),
            )

    def _run_flow(self) -> None:
        quiet_prefect()
        try:
            from flows.launch import launch

            state = launch(
                self.loaded.path,
                list(self.loaded.sets),
                build=self.build,
                attempt=self.attempt,
                return_state=True,
            )
            if not is_as_asked(state):
                state.result(raise_on_failure=True)
        except BaseException as error:  # told by the thread that follows
            self._error = error

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._interrupts += 1
        mode: StopMode = "stop" if self._interrupts == 1 else "now"
        root = RunRoot.of(self.loaded.spec.output.root)
        if is_reachable(self.loaded, root):
            ask_to_stop(root, mode, by="Ctrl-C", time_s=time.time())
        else:
            typer.echo("the output root cannot be reached from here: milepost stop", err=True)
