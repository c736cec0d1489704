"""The launch flow's story without Prefect: for terminals whose Prefect does not come up."""

from __future__ import annotations

import time
from collections.abc import Callable

from configs.load import LoadedRun
from runtime.errors import Interrupted, OwnedError, Preempted, RunError, ServiceUnavailable
from runtime.launch.image.settling import settle
from runtime.launch.sending import sender_of
from runtime.launch.standing import AttemptClass, AttemptStanding
from runtime.launch.submitting import submit_run
from runtime.launch.watching import Decision, Watcher

_POLL_S = 5.0
_MOST_SILENCES = 60
"""Polls in a row that a scheduler may leave without an answer."""


def see_through(
    loaded: LoadedRun,
    *,
    build: str | None = None,
    attempt: int | None = None,
    say: Callable[[str], object] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Submit a run and watch it, attempt after attempt, to its end. Idempotent, like its steps.

    Args:
        loaded: the run file.
        build: see ``settle``.
        attempt: the number that is asked for, as the launch flow takes it.
        say: told what changes, a line each.
        sleep: waits between looks.

    It ends without an error where the run is complete, or was stopped as somebody asked.

    Raises:
        RunError: how the last attempt ended, if no other follows; or why nothing was submitted.
    """
    sender = settle(loaded.spec, sender_of(loaded.spec), build=build).sender
    watcher = Watcher(loaded, sender)
    launch = submit_run(loaded, sender, lost_attempt=None if attempt is None else attempt - 1)
    while launch.how != "complete":
        say(f"{launch.how}: attempt {launch.attempt}")
        standing, decision = _over(watcher, launch.attempt, say, sleep)
        if decision.what == "over":
            if standing.kind is not AttemptClass.SUCCEEDED and standing.activity is None:
                raise ending(launch.attempt, standing, decision)
            return
        sleep(decision.delay_s)
        lost = max(launch.attempt, decision.lost_attempt)
        launch = submit_run(loaded, sender, reason=decision.why, lost_attempt=lost)


class News:
    """What a look at an attempt says that the last one did not: a line each."""

    def __init__(self, attempt: int) -> None:
        """Nothing was said of the attempt yet."""
        self._attempt = attempt
        self._standing = self._waiting = ""

    def of(self, standing: AttemptStanding, decision: Decision) -> list[str]:
        """The lines to say now; remembers them."""
        before = self._standing, self._waiting
        told = f"attempt {self._attempt}: {standing.kind} ({standing.raw}) {standing.reason}"
        why = decision.why if decision.what == "wait" else ""
        waits = f"attempt {self._attempt} waits: {why}" if why else ""
        self._standing, self._waiting = told, waits
        return [now for now, was in zip((told, waits), before, strict=True) if now and now != was]


def ending(attempt: int, standing: AttemptStanding, decision: Decision) -> RunError:
    """The error that stands for an attempt after which no other follows."""
    message = f"attempt {attempt}: {standing.kind} ({standing.raw}) {standing.reason}; "
    message += decision.why
    if standing.kind is AttemptClass.PREEMPTED:
        return Preempted(message)
    if standing.kind is AttemptClass.INTERRUPTED:
        return Interrupted(message)
    if standing.is_turned_away:
        return OwnedError(message)
    return RunError(message)


def _over(
    watcher: Watcher,
    attempt: int,
    say: Callable[[str], object],
    sleep: Callable[[float], None],
) -> tuple[AttemptStanding, Decision]:
    news, silences = News(attempt), 0
    while True:
        try:
            standing = watcher.look(attempt)
        except ServiceUnavailable as error:
            silences += 1
            say(error.message)
            if silences >= _MOST_SILENCES:
                raise
        else:
            silences = 0
            decision = watcher.decide(attempt, standing)
            for line in news.of(standing, decision):
                say(line)
            if decision.what != "wait":
                return standing, decision
        sleep(_POLL_S)
