"""Every error Milepost raises on purpose, and who may try again.

RunError                      base: retry, next_check, detail
├─ ConfigError                NOBODY   the run's description is wrong
│  ├─ UnavailableFeature      NOBODY   "not available yet: …"
│  └─ LaunchRefused           NOBODY   a check before submission failed
│     ├─ DirtyCheckout        NOBODY   an image is built from a commit alone
│     └─ CredentialsRefused   NOBODY   a service does not take our credentials
├─ DataError                  GROUP    within reward.skip_budget
│  ├─ VerifierCrashed         GROUP    a verifier raised, or its worker died
│  ├─ VerifierTimeout         GROUP    a verifier ran past its time limit
│  └─ BadVerdict              GROUP    a verifier returned something that is no finite number
├─ DataBudgetExceeded         NOBODY   more data failures than reward.skip_budget
├─ FilterStarved              NOBODY   filters let too little through
├─ ServingError               GROUP    a generation request failed and may be asked again
│  ├─ TransportError          GROUP    connection lost, refused or reset
│  ├─ OverloadError           GROUP    the engine refused: queue full, evicted, 429
│  ├─ UnavailableError        GROUP    no healthy engine at the moment
│  └─ GenerationTimeout       GROUP    a typed waiting, running or request deadline passed
├─ ServingStopped             NOBODY   the stop rule: half of all attempts failed for 5 minutes
├─ EngineError                SESSION
│  ├─ EngineDead              SESSION  the server or its actor is gone
│  ├─ EngineRefused           SESSION  a control call was answered with an error
│  └─ PublicationFailed       SESSION  no engine was verified at the new policy
├─ EvaluationFailed           SESSION  items failed after their retries
├─ SessionError               TASK     a new epoch is needed
│  ├─ SessionLost             TASK     the session or the guard is gone
│  └─ TrainerLost             TASK     a trainer rank is gone
├─ AttemptError               LAUNCH
│  ├─ Preempted               LAUNCH
│  ├─ Interrupted             LAUNCH
│  ├─ GroupIncomplete         LAUNCH   replicas of the attempt did not find one another
│  ├─ PreflightFailed         LAUNCH   the host an attempt got cannot run it
│  └─ ServiceUnavailable      LAUNCH   a registry, scheduler or cluster did not answer in time
├─ StoreError                 SESSION
│  ├─ DiskFull                SESSION
│  ├─ PartialWrite            SESSION  a file is shorter or other than its record says
│  └─ ManifestConflict        NOBODY   two histories claim one name
├─ FencedError                NOBODY   a newer owner exists
├─ OwnedError                 NOBODY   another process owns this run now
├─ WaitTimeout                SESSION  a deadline passed; says what was waited for
└─ ContractViolation          NOBODY   the state cannot be trusted
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar


class RetryBy(StrEnum):
    """Who may try again after an error. One authority per error."""

    GROUP = "group"
    SESSION = "session"
    TASK = "task"
    LAUNCH = "launch"
    NOBODY = "nobody"


class RunError(Exception):
    """Base of all errors that Milepost raises on purpose.

    Attributes:
        retry: who may try again.
        next_check: the operator's next look, as a sentence.
        detail: ids and numbers, JSON values only; never a secret.
    """

    retry: ClassVar[RetryBy] = RetryBy.NOBODY
    next_check: ClassVar[str] = "read the message and the journal of the run"

    def __init__(self, message: str, /, **detail: object) -> None:
        super().__init__(message)
        self.message = message
        self.detail: Mapping[str, object] = detail

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (Ray actors); keyword details must survive pickling.
        return (_rebuild, (type(self), self.message, dict(self.detail)))


def _rebuild(cls: type[RunError], message: str, detail: dict[str, object]) -> RunError:
    return cls(message, **detail)


class ConfigError(RunError):
    """The run's description is wrong; nothing was started."""

    next_check = (
        "which field, in what context; its TOML type; aliases that conflict; "
        "the same command with --debug"
    )


class UnavailableFeature(ConfigError):
    """The run file asks for machinery that this version does not have yet."""


class LaunchRefused(ConfigError):
    """A check before submission failed; nothing was built or sent."""

    next_check = "each line of the message: what was found, and what the job would need"


class DirtyCheckout(LaunchRefused):
    """An image is built from a commit, and the checkout is more than that."""

    next_check = "git status in the checkout; ignored files do not count"


class CredentialsRefused(LaunchRefused):
    """A registry, scheduler or cluster does not take our credentials."""

    next_check = "the docker config, token or block that belongs to the host named here"


class DataError(RunError):
    """One response could not be judged."""

    retry = RetryBy.GROUP
    next_check = "the example in rollout_errors.jsonl; run the verifier on it by hand"


class VerifierCrashed(DataError):
    """A verifier raised, or the worker it ran in died."""


class VerifierTimeout(DataError):
    """A verifier ran past reward.time_limit and its worker was killed."""


class BadVerdict(DataError):
    """A verifier returned something that is no finite number."""


class DataBudgetExceeded(RunError):
    """More groups failed their verifier than reward.skip_budget allows."""

    next_check = "the example named here; the verifier; reward.skip_budget"


class FilterStarved(RunError):
    """Filters rejected more than rollout.filter_max_rounds allows for one collection."""

    next_check = (
        "the counts named here: rewards that are all equal mean a task too hard, too easy, or a "
        "verifier that does not read the responses; then rollout.filter"
    )


class ServingError(RunError):
    """A generation request failed in a way that asking again can mend."""

    retry = RetryBy.GROUP
    next_check = (
        "that engine's log, health and recovery events, published version, Ray's actor state "
        "(engine recovery does not cover trainer failures)"
    )
    kind: ClassVar[str] = "serving"


class TransportError(ServingError):
    """The connection was lost, refused or reset."""

    kind = "transport"


class OverloadError(ServingError):
    """The engine refused the request: queue full, evicted by priority, or 429."""

    kind = "overload"


class UnavailableError(ServingError):
    """No healthy engine at the moment."""

    kind = "unavailable"


class GenerationTimeout(ServingError):
    """A typed waiting, running or request deadline of generation, or of scoring, passed."""

    kind = "timeout"


class ServingStopped(RunError):
    """The stop rule: at least half of all group attempts failed for five minutes on end."""

    next_check = ServingError.next_check


class EngineError(RunError):
    """An engine did not do what it was told."""

    retry = RetryBy.SESSION
    next_check = ServingError.next_check


class EngineDead(EngineError):
    """The server process or its actor is gone."""


class EngineRefused(EngineError):
    """A control call was answered with an error status or success = false."""


class PublicationFailed(EngineError):
    """No engine was verified at the new policy; the old one stays published."""

    next_check = (
        "fresh run with MILEPOST_PUBLICATION_DIAGNOSTICS=1: last stage its log reached per trainer "
        "GPU and per engine; rerun with NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=INIT,NET"
    )


class EvaluationFailed(RunError):
    """Evaluation items failed after their retries."""

    retry = RetryBy.SESSION
    next_check = "counts by error class in the message, then that engine's log"


class SessionError(RunError):
    """The processes of this epoch cannot go on; a new epoch can."""

    retry = RetryBy.TASK
    next_check = "attempts/<n>/session.log, then the newest commit in the chain"


class SessionLost(SessionError):
    """The session or the guard is gone without an end record."""


class TrainerLost(SessionError):
    """A trainer rank is gone; its siblings were ended at once."""

    next_check = "rank, host and last step named here; memory of that host; the rank's log"


class AttemptError(RunError):
    """The attempt ended from outside."""

    retry = RetryBy.LAUNCH
    next_check = "reason the scheduler gives for the newest attempt"


class Preempted(AttemptError):
    """The scheduler took the hardware back."""


class Interrupted(AttemptError):
    """A node failed or was taken away."""


class GroupIncomplete(AttemptError):
    """Replicas of the attempt did not find one another in time."""

    next_check = (
        "the group in the scheduler: id, ranks 0..N-1, leader selection, and whether every replica "
        "started; neither a longer wait nor idle nodes mend a missing group"
    )


class PreflightFailed(AttemptError):
    """The host that the attempt got cannot run it; another one may."""

    next_check = "what the message names, on that host: nvidia-smi, its interfaces, its image"


class ServiceUnavailable(AttemptError):
    """A registry, a scheduler or a cluster did not answer in time; asking again is safe."""

    next_check = "address and network of the service named here, then its own status page or log"


class StoreError(RunError):
    """Files could not be written or read as they must be."""

    retry = RetryBy.SESSION
    next_check = (
        "the commit record in the chain, the spec it was made with, owner of the root, free disk"
    )


class DiskFull(StoreError):
    """No space left for a file the run needs."""


class PartialWrite(StoreError):
    """A file is shorter than, or other than, what its record says."""


class ManifestConflict(StoreError):
    """Two histories claim one name."""

    retry = RetryBy.NOBODY


class FencedError(RunError):
    """A newer owner exists: this process must write nothing more."""

    next_check = "the newest epoch record in the chain names the owner"


class OwnedError(RunError):
    """Another process owns this run now."""

    next_check = (
        "previous attempt, lease expiry; a shared file system may still be recovering a dead "
        "node's lock, so wait or look there; the lease file stays"
    )


class WaitTimeout(RunError):
    """A deadline passed; the message says what was waited for."""

    retry = RetryBy.SESSION
    next_check = "what the message says it waited for, and that process's log"


class ContractViolation(RunError):
    """Data or state that must not be trained on. There is no switch to get past it."""

    next_check = (
        "is it exactly this checkpoint and template; how tokens align; precision; replay fields; "
        "where versions come from"
    )
