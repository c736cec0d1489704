"""Who attends to a drilled run: what the flow does, in a process that can be killed like one.

``python -m runtime.drill.attendant RUN_FILE``. It starts the run, looks at it until it is complete,
begins the next epoch of a lost one, and does what a person would: resume what stopped, retry what
is held. Whatever it saw goes to ``attendant.jsonl`` beside the run file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from configs.load import load_run
from runtime.drill.job import LEASE_S, attended
from runtime.errors import ConfigError, RunError
from runtime.launch.start import start_run
from runtime.rundir.control import Control
from runtime.rundir.layout import RunRoot
from runtime.session.answers import Done, Ended, Held, Lost, Running
from runtime.session.ensure import ensure

_PAUSE_S = 0.2


def attend(file: Path) -> None:
    """Bring the run to its end, whatever happens to it."""
    loaded = load_run(file, ())
    root = RunRoot.of(loaded.spec.output.root)
    record = attended(file)

    def say(saw: str, **fields: object) -> None:
        row = {"time": time.time(), "pid": os.getpid(), "saw": saw, **fields}
        with record.open("a") as out:
            out.write(json.dumps(row) + "\n")

    def start(reason: str, lost: int | None = None) -> None:
        try:
            launch = start_run(loaded, reason=reason, lost_attempt=lost, lease_s=LEASE_S)
        except ConfigError:
            raise
        except (RunError, OSError) as error:
            say("refused", error=f"{type(error).__name__}: {error}")
            time.sleep(_PAUSE_S)
        else:
            say(launch.how, attempt=launch.attempt, after=lost)

    start("drill")
    while True:
        match ensure(root, "finish", timeout_s=5.0, poll_s=0.1):
            case Done():
                say("complete")
                return
            case Lost() as lost:
                say("lost", reason=lost.reason)
                start("resume", lost.attempt)
            case Held() as held:
                say("held", failure=held.failure.id, message=held.failure.message)
                Control(root).request_retry(held.failure.id)
                time.sleep(_PAUSE_S)
            case Ended() as ended:
                say("ended", by=ended.ended_by, reason=ended.reason)
                start("resume")
            case Running():
                pass
            case other:
                say("other", answer=str(other))


if __name__ == "__main__":
    attend(Path(sys.argv[1]))
