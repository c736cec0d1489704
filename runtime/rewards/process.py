"""One verifier process as the pool holds it: two pipes and a way to end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import anyio
from anyio.abc import Process

import runtime
from runtime.rewards.wire import HEADER, MAX_REPLY_BYTES, body_length, unpack


class WorkerGone(Exception):
    """The process ended, or closed its side."""


class Worker:
    """One process and its two pipes."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._received = bytearray()
        self.pid = process.pid
        self.was_found_dead = False
        """It had ended while nobody used it."""

    @classmethod
    async def open(cls) -> Self:
        """Start a process in a group of its own, so that its children die with it."""
        home = str(Path(runtime.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
        process = await anyio.open_process(
            [sys.executable, "-m", "runtime.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        return cls(process)

    def is_running(self) -> bool:
        """False for one that ended while it was idle."""
        self.was_found_dead = self._process.returncode is not None
        return not self.was_found_dead

    async def send(self, frame: bytes) -> None:
        """Write one frame.

        Raises:
            WorkerGone: if the process ended.
        """
        try:
            await self._stdin.send(frame)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as exc:
            raise WorkerGone(await self._obituary()) from exc

    @property
    def has_reply(self) -> bool:
        """A whole frame is here.

        Raises:
            ValueError: if what came is no frame of ours.
        """
        return self._frame_end() is not None

    async def wait(self) -> None:
        """Wait until a whole frame is here; often it brings others along.

        Raises:
            WorkerGone: if the process ended.
            ValueError: if what came is no frame of ours.
        """
        try:
            while not self.has_reply:
                self._received += await self._stdout.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError) as exc:
            raise WorkerGone(await self._obituary()) from exc

    def take(self) -> dict[str, Any]:
        """The next frame, which must be here.

        Raises:
            ValueError: if it is no message.
        """
        end = self._frame_end()
        assert end is not None
        body = bytes(self._received[HEADER.size : end])
        del self._received[:end]
        return unpack(body)

    def _frame_end(self) -> int | None:
        if len(self._received) < HEADER.size:
            return None
        end = HEADER.size + body_length(self._received[: HEADER.size], limit=MAX_REPLY_BYTES)
        return end if len(self._received) >= end else None

    async def kill(self) -> None:
        """SIGKILL the process and everything it started, reap it, close the pipes."""
        # A group that is long gone may have left its number to another; a fresh one cannot have.
        if not self.was_found_dead:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        await self._process.aclose()

    async def _obituary(self) -> str:
        with anyio.move_on_after(1.0):
            await self._process.wait()
        code = self._process.returncode
        if code is None:
            return "its process closed its pipes"
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process exited with {code}"
