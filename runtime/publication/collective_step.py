"""One step of a collective: the engines' HTTP answers beside the trainer's side, and who erred.

A broadcast that one side never enters hangs all others. So the first error of anybody aborts the
collective on the trainer's side, which closes the connections of everybody else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import anyio

from runtime.errors import EngineRefused, RunError, SessionError, WaitTimeout
from runtime.publication.protocol import Target

Reason = tuple[str, str]
"""Class of an error, and its text."""


def reason_of(error: BaseException) -> Reason:
    """Take down an error without keeping it: a traceback holds what it went through."""
    return type(error).__name__, str(error)


@dataclass(slots=True)
class Blame:
    """What went wrong in one try of a transfer, and with whom."""

    gone: dict[int, Reason] = field(default_factory=dict[int, Reason])
    """By slot: engines that cannot go on, whoever else did what."""
    refused: dict[int, Reason] = field(default_factory=dict[int, Reason])
    """By slot: the engine whose refusal came first, when none is gone."""
    trainer: str | None = None
    """Why the trainer's side failed; often a consequence."""

    @property
    def is_clean(self) -> bool:
        """Nothing went wrong."""
        return not (self.gone or self.refused or self.trainer)


class CollectiveStep:
    """Runs one step once.

    Args:
        what: names the step in messages, with its group.
        blame: gets what went wrong.
        abort: ends the trainer's side, also while it runs.
        grace_s: how long engines may take to notice that.
    """

    def __init__(
        self, what: str, blame: Blame, *, abort: Callable[[], Awaitable[None]], grace_s: float
    ) -> None:
        self._what = what
        self._blame = blame
        self._abort_ours = abort
        self._grace_s = grace_s
        self._scope = anyio.CancelScope()
        self._is_aborted = False
        self._waiting: set[int] = set()
        self._errors: dict[int, Exception] = {}
        self._first_refusal: tuple[int, Exception] | None = None
        self._trainer_error: Exception | None = None

    async def run(
        self,
        members: Sequence[Target],
        theirs: Callable[[Target], Awaitable[None]],
        ours: Callable[[], Awaitable[None]],
    ) -> None:
        """Do both sides of the step; after it, ``blame`` tells whether it went through.

        Raises:
            SessionError: the trainer's own, if it is lost.
        """
        self._waiting = {t.slot for t in members}
        with self._scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._ours, ours)
                for target in members:
                    tasks.start_soon(self._theirs, target, theirs)
        if not self._is_aborted:
            return
        if isinstance(self._trainer_error, SessionError):
            raise self._trainer_error
        self._find_culprits()

    def _find_culprits(self) -> None:
        """Engines that are gone or do not answer; else the first that refused before the abort.

        Whoever is connected to an engine that died refuses too, and often sooner: that is a
        consequence, and so is what engines refuse after the abort.
        """
        blame = self._blame
        for slot, error in self._errors.items():
            if not isinstance(error, EngineRefused):
                blame.gone.setdefault(slot, reason_of(error))
        for slot in self._waiting:
            unanswered = WaitTimeout(f"{self._what}: no answer after it was aborted")
            blame.gone.setdefault(slot, reason_of(unanswered))
        if not blame.gone and self._first_refusal is not None:
            slot, error = self._first_refusal
            blame.refused[slot] = reason_of(error)
        if self._trainer_error is not None:
            blame.trainer = f"{self._what}: the trainer's side failed: {self._trainer_error}"

    async def _theirs(self, target: Target, call: Callable[[Target], Awaitable[None]]) -> None:
        try:
            await call(target)
        except Exception as exc:  # whatever one engine's client raises is that engine's end
            self._errors[target.slot] = exc
            if not self._is_aborted:
                self._first_refusal = (target.slot, exc)
            await self._abort()
        self._waiting.discard(target.slot)

    async def _ours(self, call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except (RunError, RuntimeError, OSError) as exc:
            self._trainer_error = exc
            await self._abort()

    async def _abort(self) -> None:
        if not self._is_aborted:
            self._is_aborted = True
            self._scope.deadline = anyio.current_time() + self._grace_s
            await self._abort_ours()
