"""A flow beside a terminal: the flow runs in a thread, the terminal watches and takes Ctrl-C.

The flow is for people; the run needs neither it nor a Prefect server. So the command follows the
run directory to the end whatever becomes of the flow.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from runtime.rundir import workflow
from runtime.rundir.control import StopMode
from runtime.rundir.layout import RunRoot
from runtime.session.answers import Held, Lost, Running
from runtime.session.ensure import ensure
from runtime.session.stopping import ask_to_stop
from runtime.telemetry.progress import RunProgress

_FLOW_DEADLINE_S = 60.0
"""For the flow to show the end, once the run has ended."""
_LOST_PATIENCE_S = 60.0
"""The flow's retry starts a new epoch; so long nobody may work on the run."""


@dataclass(slots=True)
class Attached:
    """One run in one terminal."""

    root: RunRoot
    run_file: Path
    sets: Sequence[str]
    attempt: int
    """The one that the command started or attached to; its flow starts no other in its place."""
    _interrupts: int = field(default=0, init=False)
    _flow_error: str | None = field(default=None, init=False)

    def follow(self) -> str | None:
        """Show the run until it ends; Ctrl-C once stops it with a commit, twice at once.

        Returns:
            What went wrong with the flow, if anything; the run has ended all the same.
        """
        signal.signal(signal.SIGINT, self._interrupted)
        flow = threading.Thread(target=self._run_flow, name="flow", daemon=True)
        flow.start()
        with RunProgress() as progress:
            self._watch(flow, progress)
        flow.join(_FLOW_DEADLINE_S)
        if flow.is_alive():
            return f"the flow did not end within {_FLOW_DEADLINE_S:g} s of the run"
        return self._flow_error

    def _watch(self, flow: threading.Thread, progress: RunProgress) -> None:
        lost_since: float | None = None
        while True:
            answer = ensure(self.root, "finish", timeout_s=0.0)
            view = workflow.read(self.root)
            if view is not None:
                progress.show(view.model_dump(mode="json"))
            match answer:
                case Running() | Held():
                    lost_since = None
                case Lost():
                    # A new epoch is the flow's to start; without it the run is left as it is.
                    lost_since = lost_since or time.monotonic()
                    if not flow.is_alive() or time.monotonic() - lost_since > _LOST_PATIENCE_S:
                        return
                case _:
                    return
            time.sleep(0.5)

    def _run_flow(self) -> None:
        quiet_prefect()
        try:
            from flows.train import train

            train(self.run_file, list(self.sets), self.attempt, return_state=True)
        except Exception as error:  # the flow is a display: whatever breaks it, the run goes on
            self._flow_error = f"{type(error).__name__}: {error}"

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._interrupts += 1
        mode: StopMode = "stop" if self._interrupts == 1 else "now"
        ask_to_stop(self.root, mode, by="Ctrl-C", time_s=time.time())


def quiet_prefect() -> None:
    """Prefect's defaults for a terminal: no telemetry, and only warnings beside the bar.

    Also patience with a server that is restarted: 2 + 4 + ... + 256 s, where Prefect's own five
    retries give up after a minute. For deployments `prefect.yaml` says the same.
    """
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "8")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    # A busy machine needs longer than Prefect's 20 s to bring its own server up.
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "ERROR")
