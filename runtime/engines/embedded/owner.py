"""The owner of one embedded engine: starts the server as a child process and ends it.

Child process or a thread in the Ray actor? The costly part, torch, is loaded once either way: the
owner imports neither torch nor aiohttp (USS seen: owner 27 MB, server 300-370 MB), so a thread
would save one small interpreter. The child gives what a thread cannot: `kill -9` of the server
leaves an owner that says so at once; the decoder shares its interpreter lock with nobody; one
thread of arithmetic is set before torch is loaded; and the owner of SGLang has the same shape. The
child holds one end of a pipe whose other end is ours: it ends when we do, however we do.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime import faults
from runtime.engines.embedded.settings import EngineSettings
from runtime.engines.protocol import EngineAddress
from runtime.errors import EngineDead, WaitTimeout
from runtime.waits import stretched

START_DEADLINE_S = 120.0
"""From spawn to the first answer: imports, weights, one check of the decode step."""

STOP_GRACE_S = 3.0
"""From the closed pipe to SIGKILL."""

MAX_LOG_TAIL = 2000


@dataclass(slots=True, kw_only=True)
class EmbeddedOwner:
    """Owns one slot. Picklable before ``start``: it travels into its Ray actor.

    Methods are sync and take turns; ``is_running`` may be called from another thread.
    """

    slot: int
    settings: EngineSettings
    log_path: str | None = None
    """The server's stderr is appended here; None: where the owner's goes."""
    start_deadline_s: float = START_DEADLINE_S
    _process: Any = field(default=None, init=False, repr=False)

    def start(self) -> EngineAddress:
        """Start a new incarnation, ending one that runs, and wait until it answers.

        Raises:
            WaitTimeout: if it does not answer within ``start_deadline_s``, stretched.
            EngineDead: if it exits before; with the end of its log.
        """
        self.stop()
        if faults.plan is not None:
            faults.plan.reach("engine.spawn")
        incarnation = uuid.uuid4().hex
        stderr = None if self.log_path is None else Path(self.log_path).open("ab")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "runtime.engines.embedded.server", "--owned"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=_environment(self.settings.torch_threads),
                start_new_session=True,
            )
        finally:
            if stderr is not None:
                stderr.close()
        try:
            ready = self._ready(self._process)
        except BaseException:
            self._end(grace_s=0.0)  # it has nothing to finish
            raise
        return EngineAddress(
            slot=self.slot, incarnation=incarnation, url=ready["url"], pid=int(ready["pid"])
        )

    def is_running(self) -> bool:
        """The server process exists."""
        process = self._process
        return process is not None and process.poll() is None

    def stop(self) -> None:
        """End the server: close its pipe, then kill what is left after a grace. Idempotent."""
        self._end(grace_s=STOP_GRACE_S)

    def _end(self, *, grace_s: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if faults.plan is not None:
            faults.plan.reach("engine.end")
        with contextlib.suppress(BrokenPipeError, OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        # Its session is its own, so this reaches what it started and nothing else.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()

    def _ready(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Send the settings and read the line that says it answers."""
        assert process.stdin is not None  # both are pipes
        assert process.stdout is not None
        deadline_s = stretched("readiness", self.start_deadline_s)
        try:
            process.stdin.write(_settings_line(self.settings))
            process.stdin.flush()
        except BrokenPipeError:
            raise self._dead(process) from None
        deadline, line = time.monotonic() + deadline_s, b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise WaitTimeout(
                        f"waited {deadline_s:g} s for the server of slot {self.slot} to answer",
                        slot=self.slot,
                        deadline_s=deadline_s,
                    )
                part = os.read(process.stdout.fileno(), 4096)
                if not part:
                    raise self._dead(process)
                line += part
        return json.loads(line)

    def _dead(self, process: subprocess.Popen[bytes]) -> EngineDead:
        code = process.wait(STOP_GRACE_S)
        tail = ""
        if self.log_path is not None:
            tail = Path(self.log_path).read_text(errors="replace")[-MAX_LOG_TAIL:]
        return EngineDead(
            f"the server of engine slot {self.slot} exited with {code} before it answered: {tail}",
            slot=self.slot,
            exit_code=code,
        )


def _settings_line(settings: EngineSettings) -> bytes:
    plain = settings.model_dump(mode="json")
    if settings.api_key is not None:
        plain["api_key"] = settings.api_key.get_secret_value()
    return json.dumps(plain).encode() + b"\n"


def _environment(torch_threads: int) -> dict[str, str]:
    """The owner's environment, with arithmetic threads set before torch is imported."""
    root = str(Path(__file__).resolve().parents[3])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    threads = str(torch_threads)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
