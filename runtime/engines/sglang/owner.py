"""The owner of one SGLang server: starts it as a group of processes, and ends all of them.

The server holds one end of a pipe whose other end is ours: whatever happens to us, the pipe ends,
and the server's group with it. What travels through that pipe is the command line and the key, so
that neither stands where other users of the machine can read it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import structlog

from runtime.engines.keepalive import check_keepalive_order
from runtime.engines.protocol import EngineAddress
from runtime.engines.sglang.bounded_log import BoundedLog
from runtime.engines.sglang.environment import make_private, server_environment
from runtime.engines.sglang.gpu_memory import freed
from runtime.engines.sglang.process_group import Member, end_group, is_left, members
from runtime.engines.sglang.settings import SglangSettings, command_line
from runtime.errors import EngineDead, WaitTimeout
from runtime.telemetry.events import Event
from runtime.waits import stretched

START_DEADLINE_S = 600.0
"""From spawn to the first token: imports, weights, and kernels that are compiled the first time."""

STOP_GRACE_S = 3.0
"""From SIGTERM to SIGKILL. It has nothing to save, only shared memory to tidy up."""

_POLL_S = 0.25
_PROBE_S = 10.0
_TELL_EVERY_S = 15.0
_WORKERS = "sglang::"
"""How the server's schedulers and detokenizers call themselves."""

_log = structlog.get_logger("engine")


@dataclass(slots=True, kw_only=True)
class SglangOwner:
    """Owns one slot. Picklable before ``start``: it travels into its Ray actor.

    Methods are sync and take turns; ``is_running`` may be called from another thread.
    """

    slot: int
    settings: SglangSettings
    log_path: str
    """Everything the server's processes write; bounded (``BoundedLog``)."""
    scratch: str | None = None
    """Where its private folder is made. Sockets want a short path. None, or a folder that is not
    on this host: the temporary folder."""
    start_deadline_s: float = START_DEADLINE_S
    _process: Any = field(default=None, init=False, repr=False)
    _log: BoundedLog | None = field(default=None, init=False, repr=False)
    _workers: tuple[Member, ...] = field(default=(), init=False, repr=False)
    _private: str | None = field(default=None, init=False, repr=False)

    def start(self) -> EngineAddress:
        """Start a new incarnation, ending one that runs, and wait until it generates.

        Raises:
            ConfigError: if it would close idle connections that our clients may still use.
            WaitTimeout: if it does not within ``start_deadline_s``, stretched; with its last words.
            EngineDead: if it exits before; with the end of its log.
        """
        check_keepalive_order(server_s=self.settings.keepalive_s)
        self.stop()
        incarnation = uuid.uuid4().hex
        deadline = time.monotonic() + stretched("readiness", self.start_deadline_s)
        self._log = BoundedLog(Path(self.log_path))
        begin = self._log.size()
        is_here = self.scratch is not None and Path(self.scratch).is_dir()
        self._private = tempfile.mkdtemp(
            prefix=f"e{self.slot}-", dir=self.scratch if is_here else None
        )
        make_private(Path(self._private))
        try:
            port = self._spawn(self._log, begin, deadline)
            self._wait_until_it_generates(port, begin, deadline)
        except BaseException:
            self._end(grace_s=0.0)
            raise
        pid = self._process.pid
        self._workers = tuple(m for m in members(pid) if m.title.startswith(_WORKERS))
        return EngineAddress(
            slot=self.slot,
            incarnation=incarnation,
            url=f"http://{self.settings.host}:{port}",
            pid=pid,
        )

    def is_running(self) -> bool:
        """The server and every worker it started exist."""
        process = self._process
        return process is not None and process.poll() is None and all(map(is_left, self._workers))

    def stop(self) -> None:
        """End the server and everything it started. Idempotent."""
        self._end(grace_s=STOP_GRACE_S)

    # --- Starting -----------------------------------------------------------------------------

    def _spawn(self, log: BoundedLog, begin: int, deadline: float) -> int:
        """Start the process; returns the port it has taken."""
        assert self._private is not None
        private = Path(self._private)
        told, tells = os.pipe()
        output = log.open()
        try:
            self._process = subprocess.Popen(
                [self.settings.python, "-m", "runtime.engines.sglang.inside.launch", str(tells)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=server_environment(self.settings, private),
                cwd=private,
                pass_fds=(tells,),
                start_new_session=True,
            )
        except OSError as error:
            os.close(told)
            raise EngineDead(
                f"engine slot {self.slot}: {self.settings.python} could not be run: {error}",
                slot=self.slot,
            ) from error
        finally:
            os.close(output)
            os.close(tells)
        log.watch()
        with os.fdopen(told, "rb", buffering=0) as ear:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(_order(self.settings))
                self._process.stdin.flush()
            # It tells its port before anything heavy is imported.
            os.set_blocking(ear.fileno(), False)
            line = b""
            while not line.endswith(b"\n"):
                self._check(begin, deadline)
                line += ear.read(4096) or b""
                time.sleep(0.02)
        return int(json.loads(line)["port"])

    def _wait_until_it_generates(self, port: int, begin: int, deadline: float) -> None:
        """Until the server has made a token of its own; its last line is told now and then."""
        started = time.monotonic()
        tell_at = started + _TELL_EVERY_S
        while not self._answers(port):
            self._check(begin, deadline)
            now = time.monotonic()
            if now >= tell_at:
                tell_at = now + _TELL_EVERY_S
                _log.info(
                    Event.ENGINE_STARTING,
                    slot=self.slot,
                    elapsed_s=round(now - started, 1),
                    says=self._last_line(begin),
                )
            time.sleep(_POLL_S)

    def _answers(self, port: int) -> bool:
        request = urllib.request.Request(f"http://{self.settings.host}:{port}/health_generate")
        # No proxy of the environment stands between an owner and its own child.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=_PROBE_S) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def _check(self, begin: int, deadline: float) -> None:
        assert self._log is not None
        code = self._process.poll()
        if code is not None:
            raise EngineDead(
                f"the server of engine slot {self.slot} exited with {code} before it answered: "
                f"{self._log.tail(begin)}",
                slot=self.slot,
                exit_code=code,
            )
        if time.monotonic() >= deadline:
            limit_s = stretched("readiness", self.start_deadline_s)
            raise WaitTimeout(
                f"waited {limit_s:g} s for the server of slot {self.slot} to generate; its last "
                f"words: {self._last_line(begin)}",
                slot=self.slot,
                deadline_s=limit_s,
            )

    def _last_line(self, begin: int) -> str:
        assert self._log is not None
        lines = self._log.tail(begin).splitlines()
        return lines[-1][:300] if lines else "nothing"

    # --- Ending -------------------------------------------------------------------------------

    def _end(self, *, grace_s: float) -> None:
        process, self._process = cast("subprocess.Popen[bytes] | None", self._process), None
        self._workers = ()
        if process is not None:
            pids = {m.pid for m in members(process.pid)} | {process.pid}
            is_gone = end_group(process, grace_s=grace_s)
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            if not is_gone or not freed(pids):
                _log.warning(
                    Event.ENGINE_STOPPED, slot=self.slot, pids=sorted(pids), group_gone=is_gone
                )
        log, self._log = self._log, None
        if log is not None:
            log.close()
        private, self._private = self._private, None
        if private is not None:
            shutil.rmtree(private, ignore_errors=True)


def _order(settings: SglangSettings) -> bytes:
    key = settings.api_key
    order = {
        "args": command_line(settings),
        "host": settings.host,
        "api_key": None if key is None else key.get_secret_value(),
        "model_path": settings.model_path,
        "trust_remote_code": settings.args.get("trust_remote_code", False) is True,
    }
    return json.dumps(order).encode() + b"\n"
