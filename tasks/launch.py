"""Image, submission, watching: the steps of bringing a run to a scheduler.

What a registry or scheduler did not answer is asked again (``RetryBy.LAUNCH``): every call behind
these tasks is idempotent. Anything else is final. Results are never cached: they hold clients.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from prefect import State, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.states import Cancelled

from configs.load import LoadedRun, load_run
from configs.plan import make_plan
from runtime.errors import RetryBy
from runtime.launch.attempts import Launch
from runtime.launch.composing import scheduler_claim, submission_of
from runtime.launch.driving import News, ending
from runtime.launch.standing import AttemptStanding
from runtime.launch.submission import canonical_json
from runtime.launch.submitting import Sender, submit_run
from runtime.launch.watching import Decision, Watcher
from tasks.display import only_display
from tasks.retrying import retried_by

RETRIES = 4
RETRY_DELAYS_S = [2.0, 10.0, 30.0, 60.0]
POLL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run on its way to a scheduler."""

    loaded: LoadedRun
    sender: Sender

    @property
    def key(self) -> str:
        """The name in the letters that artifact keys allow."""
        name = self.loaded.spec.name.lower()
        return "".join(c if c.isalnum() else "-" for c in name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """How an attempt ended."""

    attempt: int
    standing: AttemptStanding
    decision: Decision

    @property
    def lost_attempt(self) -> int:
        """The newest attempt that the next one takes over from."""
        return max(self.attempt, self.decision.lost_attempt)


may_ask_again = retried_by(RetryBy.LAUNCH)
"""Retry condition: the error says that whoever launches may try again."""


def load(run_file: Path, sets: list[str]) -> LoadedRun:
    """The run file; problems are all in the message.

    Raises:
        RunFileError: if it has problems.
    """
    return load_run(run_file, sets)


@task(
    name="image",
    cache_policy=NO_CACHE,
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=may_ask_again,
)
def settle_image(run: Run, build: str | None, checkout: Path | None = None) -> Run:
    """The image of the run: the one that is named, the one that is built now, or none.

    Raises:
        LaunchRefused: if one is named and one is to be built, or it cannot run this job.
    """
    from runtime.launch.image.settling import settle

    settled = settle(run.loaded.spec, run.sender, build=build, checkout=checkout)
    if settled.how is not None:
        get_run_logger().info("image %s: %s", settled.how, settled.sender.image)
    return replace(run, sender=settled.sender)


@task(
    name="submit",
    cache_policy=NO_CACHE,
    task_run_name="submit {run.loaded.spec.name}",
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=may_ask_again,
)
def submit(run: Run, *, reason: str = "start", lost_attempt: int | None = None) -> Launch:
    """The next attempt is at its scheduler; shows the document that was sent."""
    launch = submit_run(run.loaded, run.sender, reason=reason, lost_attempt=lost_attempt)
    get_run_logger().info("%s: attempt %s %s", launch.how, launch.attempt, launch.notice)
    _show_document(run, launch.attempt, reason)
    return launch


@task(
    name="watch",
    cache_policy=NO_CACHE,
    task_run_name="watch attempt {attempt}",
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=may_ask_again,
)
def watch(run: Run, attempt: int) -> Watched:
    """The attempt is over, and it is decided what follows.

    One whose hardware was taken away is an answer like any other: the flow goes on from it where
    the run file lets it.
    """
    watcher = Watcher(run.loaded, run.sender)
    news = News(attempt)
    while True:
        standing = watcher.look(attempt)
        decision = watcher.decide(attempt, standing)
        for line in news.of(standing, decision):
            get_run_logger().info("%s", line)
        if decision.what != "wait":
            _show_standing(run, attempt, standing)
            return Watched(attempt=attempt, standing=standing, decision=decision)
        time.sleep(POLL_S)


@task(name="wait", task_run_name="wait {delay_s:g} s before another attempt")
def back_off(delay_s: float) -> None:
    """Hardware that was just taken away is not asked for at once."""
    time.sleep(delay_s)


def ended(watched: Watched) -> State[str]:
    """How a flow ends when no attempt follows one that did not succeed.

    Returns:
        Cancelled, under the name of what was asked for: a stopped run is no failed one.

    Raises:
        RunError: if nobody asked for the end.
    """
    error = ending(watched.attempt, watched.standing, watched.decision)
    if watched.standing.activity is None:
        raise error
    return Cancelled(name=watched.standing.activity.capitalize(), message=error.message)


def _show_document(run: Run, attempt: int, reason: str) -> None:
    plan = make_plan(run.loaded)
    claim = scheduler_claim(run.sender.backend.name, run.loaded.spec.model_dump_json(), plan)
    submission = submission_of(
        run.loaded, plan, attempt=attempt, image=run.sender.image, claim=claim, reason=reason
    )
    document = canonical_json(run.sender.backend.render(submission))
    text = f"## Attempt {attempt} as {run.sender.backend.name} got it\n\n```json\n{document}\n```"
    with only_display("the rendered document"):
        create_markdown_artifact(
            markdown=text, key=f"{run.key}-submission", description=f"attempt {attempt}"
        )


def _show_standing(run: Run, attempt: int, standing: AttemptStanding) -> None:
    rows = [
        {"rank": r.rank, "class": r.kind.value, "scheduler": r.raw, "host": r.host, "why": r.reason}
        for r in standing.ranks
    ] or [{"rank": "-", "class": standing.kind.value, "scheduler": standing.raw,
           "host": "-", "why": standing.reason}]  # fmt: skip
    with only_display("the attempt's standing"):
        create_table_artifact(
            table=rows, key=f"{run.key}-attempt", description=f"attempt {attempt}: {standing.kind}"
        )
