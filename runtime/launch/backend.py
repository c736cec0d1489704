"""What every submission backend does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from runtime.launch.receipts import LaunchReceipt
from runtime.launch.standing import AttemptStanding
from runtime.launch.submission import Submission


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """The scheduler's answer to a submission."""

    job: str
    """Its id."""
    was_there: bool = False
    """The attempt had been submitted before: a lost answer, or a rival of the same attempt."""
    url: str | None = None
    """Where a person looks at it."""
    mark: str | None = None
    """``Submission.mark`` of what stands there under the name, where ``was_there``; None where the
    job does not say."""
    detail: dict[str, Any] = field(default_factory=dict[str, Any])


class LaunchBackend(Protocol):
    """Brings an attempt to a scheduler and says what became of it.

    Every call has a deadline of its own. ``submit`` is idempotent by the attempt's key: sent twice,
    one job runs.

    Raises (every call):
        ServiceUnavailable: if the scheduler did not answer in time.
        CredentialsRefused: if it does not take ours.
    """

    name: str

    @property
    def where(self) -> str:
        """Address or name of what it submits to, for receipts."""
        ...

    def render(self, submission: Submission) -> dict[str, Any]:
        """The exact document that is sent."""
        ...

    def check(self, submission: Submission) -> list[str]:
        """Every reason why the rendered document must not be sent; empty when there is none."""
        ...

    def submit(self, submission: Submission) -> Submitted:
        """Send it, or find it sent.

        Raises:
            LaunchRefused: if the scheduler refuses it.
        """
        ...

    def job_of(self, key: str) -> str | None:
        """The id of the job that was submitted under an attempt's key, by whomever.

        Where a key is the id, that is the answer, and nobody is asked whether the job is there.

        Args:
            key: the attempt's name at the scheduler.

        Returns:
            None where the scheduler knows of no such job.
        """
        ...

    def look(self, receipt: LaunchReceipt) -> AttemptStanding:
        """Where the attempt of a receipt stands."""
        ...

    def stop(self, receipt: LaunchReceipt) -> None:
        """Ask the scheduler to end it. Idempotent; one that is over stays as it is."""
        ...
