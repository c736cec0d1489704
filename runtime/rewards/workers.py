"""Verification in processes that can be killed.

    judge -> free worker -> one frame out, verdicts in -> rewards
               |  no verdict within the time limit          VerifierTimeout
               |  an error, or the process is gone          VerifierCrashed
               |  a verdict that is no finite number        BadVerdict

After each of these the worker is killed, and the response goes to a fresh one once more; the second
error is the group's. Verdicts that travelled together may have been lost with the first worker, so
the later ones send each by itself: the response that is charged is the one that failed.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import anyio
import structlog

from runtime.data.samples import Prompt
from runtime.errors import (
    BadVerdict,
    ConfigError,
    DataError,
    VerifierCrashed,
    VerifierTimeout,
    WaitTimeout,
)
from runtime.rewards.process import Worker, WorkerGone
from runtime.rewards.verifiers import VerifierSpec
from runtime.rewards.wire import pack

_log = structlog.get_logger("rewards.workers")

_SHOWN_CHARS = 500
_REAP_DEADLINE_S = 5.0


@dataclass(slots=True, kw_only=True)
class PoolCounts:
    """What a pool has been through; for telemetry."""

    judged: int = 0
    """Responses with a verdict."""
    started: int = 0
    """Worker processes, replacements included."""
    timeouts: int = 0
    crashes: int = 0
    bad_verdicts: int = 0


class VerifierPool:
    """A bounded number of verifier processes behind one call; an async context manager.

    Args:
        verifiers: every verifier the prompts name.
        workers: processes; also the number of groups judged at the same time.
        time_limit_s: for one response, or for one call of a batched verifier.
        start_deadline_s: for a process to start and import its verifiers.
        queue_deadline_s: for a free worker.
        memory_limit_bytes: of one worker's data; None sets no limit.
        search_paths: where verifiers by import path are looked for first.
    """

    def __init__(
        self,
        verifiers: Sequence[VerifierSpec],
        *,
        workers: int = 2,
        time_limit_s: float = 10.0,
        start_deadline_s: float = 60.0,
        queue_deadline_s: float = 1800.0,
        memory_limit_bytes: int | None = 4 << 30,
        search_paths: Sequence[Path] = (),
    ) -> None:
        if workers < 1:
            raise ValueError(f"a verifier pool needs workers: {workers}")
        self.counts = PoolCounts()
        self._names = {spec.name for spec in verifiers}
        self._num_workers = workers
        self._time_limit_s = time_limit_s
        self._start_deadline_s = start_deadline_s
        self._queue_deadline_s = queue_deadline_s
        self._hello = pack(
            {
                "verifiers": [
                    {"name": s.name, "arguments": dict(s.arguments), "batched": s.batched}
                    for s in verifiers
                ],
                "memory_limit_bytes": memory_limit_bytes,
                "search_paths": [str(path) for path in search_paths],
            }
        )
        self._slots = anyio.Semaphore(workers)
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._is_closed = False
        self._num_requests = 0

    async def __aenter__(self) -> Self:
        """Start one worker, so that a verifier that cannot be loaded is known before training.

        The others start when they are first needed.

        Raises:
            ConfigError: if a verifier cannot be loaded.
            WaitTimeout: if a worker does not start in time.
        """
        try:
            self._idle.append(await self._start())
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def judge(self, prompt: Prompt, texts: Sequence[str]) -> list[float]:
        """Reward of each text, in order; a response whose verification fails is tried once more.

        Cancelling it kills the worker that was judging.

        Raises:
            VerifierCrashed: a verifier raised or its process died, twice on the same response.
            VerifierTimeout: a verifier ran past the time limit, the second time.
            BadVerdict: the second verdict, too, was no finite number.
            ConfigError: the prompt names a verifier the pool does not have.
            anyio.ClosedResourceError: the pool is closed, or was closed meanwhile.
            WaitTimeout: no worker became free, or a replacement did not start, in time.
        """
        if prompt.verifier not in self._names:
            raise ConfigError(
                f"prompt {prompt.id} names verifier {prompt.verifier!r}; "
                f"the pool has {sorted(self._names)}"
            )
        verdicts: list[float] = []
        failed_at = -1
        async with self._slot(prompt):
            while len(verdicts) < len(texts):
                try:
                    await self._judge(prompt, texts, verdicts, apart=failed_at >= 0)
                except DataError as error:
                    _log.warning(
                        "verifier.failed",
                        error=type(error).__name__,
                        is_final=failed_at == len(verdicts),
                        **error.detail,
                    )
                    if failed_at == len(verdicts):
                        raise
                    failed_at = len(verdicts)
        return verdicts

    async def aclose(self, *, deadline_s: float = _REAP_DEADLINE_S) -> None:
        """Kill all workers and wait for their ends, at most ``deadline_s`` in all. Idempotent."""
        self._is_closed = True
        self._idle.clear()
        with anyio.move_on_after(deadline_s, shield=True) as scope:
            for worker in list(self._all):
                await self._retire(worker)
        if scope.cancelled_caught:
            _log.warning("verifier.unreaped", pids=[worker.pid for worker in self._all])

    @asynccontextmanager
    async def _slot(self, prompt: Prompt) -> AsyncGenerator[None]:
        try:
            with anyio.fail_after(self._queue_deadline_s):
                await self._slots.acquire()
        except TimeoutError as exc:
            raise WaitTimeout(
                f"prompt {prompt.id} waited {self._queue_deadline_s:g} s for a free verifier "
                f"worker ({self._num_workers} are busy)"
            ) from exc
        try:
            yield
        finally:
            self._slots.release()

    async def _judge(
        self, prompt: Prompt, texts: Sequence[str], verdicts: list[float], *, apart: bool
    ) -> None:
        """Append verdicts of the texts that have none; only a full success spares the worker."""
        worker = await self._take()
        is_whole = False
        try:
            self._num_requests += 1
            request: dict[str, object] = {
                "request": self._num_requests,
                "verifier": prompt.verifier,
                "responses": list(texts[len(verdicts) :]),
                "answer": prompt.answer,
                "metadata": dict(prompt.metadata),
                "apart": apart,
            }
            await self._ask(worker, request, prompt, texts, verdicts)
            is_whole = True
        finally:
            if is_whole and not self._is_closed:
                self._idle.append(worker)
            else:
                await self._retire(worker)

    async def _ask(
        self,
        worker: Worker,
        request: dict[str, object],
        prompt: Prompt,
        texts: Sequence[str],
        verdicts: list[float],
    ) -> None:
        frame: bytes | None = pack(request)
        while len(verdicts) < len(texts):
            example = _Example(prompt, texts[len(verdicts)])
            try:
                if not worker.has_reply:
                    with anyio.fail_after(self._time_limit_s):
                        if frame is not None:
                            await worker.send(frame)
                            frame = None
                        await worker.wait()
                reply = worker.take()
                if reply.get("request") != request["request"]:
                    raise ValueError("it answered what nobody asked")
            except TimeoutError as exc:
                self.counts.timeouts += 1
                raise example.error(
                    VerifierTimeout, f"no verdict within {self._time_limit_s:g} s"
                ) from exc
            except (WorkerGone, ValueError) as exc:
                self.counts.crashes += 1
                raise example.error(VerifierCrashed, str(exc)) from exc
            verdicts += self._verdicts(reply, len(texts) - len(verdicts), example)

    def _verdicts(self, reply: Mapping[str, Any], most: int, example: _Example) -> list[float]:
        if "error" in reply:
            self.counts.crashes += 1
            trace = str(reply.get("trace", ""))
            raise example.error(VerifierCrashed, str(reply["error"]), trace=trace)
        said: object = reply.get("verdicts")
        found = cast(list[object], said) if isinstance(said, list) else []
        good = [v for v in found if isinstance(v, float) and math.isfinite(v)]
        if not found or len(good) != len(found) or len(found) > most:
            self.counts.bad_verdicts += 1
            raise example.error(BadVerdict, f"no finite number: {said!r:.200}")
        self.counts.judged += len(good)
        return good

    async def _take(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_running():
                return worker
            await self._retire(worker)  # it died while idle; nobody's response is to blame
        return await self._start()

    async def _start(self) -> Worker:
        if self._is_closed:
            raise anyio.ClosedResourceError("the verifier pool is closed")
        worker = await Worker.open()
        self._all.add(worker)
        self.counts.started += 1
        is_ready = False
        try:
            with anyio.fail_after(self._start_deadline_s):
                await worker.send(self._hello)
                await worker.wait()
                reply = worker.take()
            if "ready" not in reply:
                raise ConfigError(
                    f"a verifier cannot be loaded: {reply.get('refused')}",
                    trace=str(reply.get("trace", "")),
                )
            is_ready = True
        except TimeoutError as exc:
            raise WaitTimeout(
                f"a verifier worker was not ready within {self._start_deadline_s:g} s"
            ) from exc
        except (WorkerGone, ValueError) as exc:
            raise ConfigError(
                f"a verifier worker died while it loaded its verifiers: {exc}"
            ) from exc
        finally:
            if not is_ready:
                await self._retire(worker)
        return worker

    async def _retire(self, worker: Worker) -> None:
        with anyio.move_on_after(_REAP_DEADLINE_S, shield=True):
            await worker.kill()
            self._all.discard(worker)


@dataclass(frozen=True, slots=True)
class _Example:
    """What an error shows of the response that met it."""

    prompt: Prompt
    text: str

    def error(self, kind: type[DataError], message: str, **detail: object) -> DataError:
        return kind(
            f"verifier {self.prompt.verifier} on prompt {self.prompt.id}: {message}; "
            f"response {self.text[:_SHOWN_CHARS]!r}",
            prompt=str(self.prompt.id),
            verifier=self.prompt.verifier,
            response=self.text[:_SHOWN_CHARS],
            **detail,
        )
