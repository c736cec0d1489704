"""Submitting an attempt: who may, a receipt before the call, the call, the receipt after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from configs.load import LoadedRun
from configs.plan import make_plan
from configs.runtime_lock import RuntimeLock
from runtime import faults
from runtime.clock import Clock, SystemClock
from runtime.errors import ConfigError, LaunchRefused
from runtime.launch.attempts import Asked, Launch, ask, spec_digest, win_or_attach
from runtime.launch.backend import LaunchBackend, Submitted
from runtime.launch.composing import scheduler_claim, submission_of
from runtime.launch.receipts import LaunchReceipt, Receipts
from runtime.launch.submission import Submission, owned_names
from runtime.rundir.attempt import Claim
from runtime.rundir.claims import newest_claimed, read_claim
from runtime.rundir.layout import RunRoot
from runtime.rundir.processes import HostBoot
from runtime.rundir.records import EpochRecord

SENT_WITHIN_S = 900.0
"""Of its claim an attempt is at its scheduler, or its submitter has given up or died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Who submits, and with what. One per command or flow."""

    backend: LaunchBackend
    receipts: Receipts = field(default_factory=Receipts)
    image: str | None = None
    """By digest or scheduler id; None: the run file's, or none."""
    image_revision: str | None = None
    revision: str | None = None
    """Commit of this checkout."""
    dirty: bool = False
    lock: RuntimeLock | None = None
    clock: Clock = field(default_factory=SystemClock)


def submit_run(
    loaded: LoadedRun, sender: Sender, *, reason: str = "start", lost_attempt: int | None = None
) -> Launch:
    """Submit the next attempt of a run, or attach to the live one. Idempotent.

    Args:
        loaded: the run file.
        sender: where to, and what is recorded.
        reason: for the epoch record.
        lost_attempt: an attempt that its scheduler says is over; see ``win_or_attach``. None: nor
            is one attached to that its scheduler says is over before it owned the run.

    Raises:
        LaunchRefused: if a check fails; nothing was sent.
        ConfigError: if the root belongs to another training.
        ServiceUnavailable: if the scheduler did not answer; the same call again is safe.
    """
    root = RunRoot.of(loaded.spec.output.root)
    spec_json = loaded.spec.model_dump_json()
    claim, made = _making(loaded, sender, reason)
    # Everything that can be refused is, before a number is taken; the document is the same but for
    # the number.
    refuse(sender.backend, made(1))
    if not is_reachable(loaded, root):
        return _send(made(_next_by_receipts(sender, root, lost_attempt)), sender)
    standing = _standing_submission(sender, root, spec_json, lost_attempt, made)
    if standing is not None:
        return _send(standing, sender)
    here = HostBoot.here()
    asked = ask(root, clock=sender.clock, here=here, lost_attempt=lost_attempt)
    is_unowned = lost_attempt is None and _ended_unowned(asked, sender, made)
    if is_unowned or _was_never_sent(asked, root, claim, sender, made):
        lost_attempt = asked.attempt
    launch, attempt = win_or_attach(
        root, claim, spec_json, clock=sender.clock, here=here, lost_attempt=lost_attempt
    )
    if attempt is None:
        return _follow(launch, root, sender, made)
    return _send(made(launch.attempt), sender)


def asked_attempt(loaded: LoadedRun, sender: Sender) -> int:
    """The number of the attempt that submitting this run now would start or attach to.

    Takes and writes nothing. Whoever submits it as the one after its predecessor, once or again,
    gets that attempt, however it stands by then.

    Raises:
        ServiceUnavailable: if the scheduler did not answer.
    """
    root = RunRoot.of(loaded.spec.output.root)
    if not is_reachable(loaded, root):
        return _next_by_receipts(sender, root, None)
    asked = ask(root, clock=sender.clock, here=HostBoot.here())
    _, made = _making(loaded, sender, "start")
    return asked.attempt + 1 if _ended_unowned(asked, sender, made) else asked.attempt


def _making(
    loaded: LoadedRun, sender: Sender, reason: str
) -> tuple[Claim, Callable[[int], Submission]]:
    """The claim of a run's attempts at this scheduler, and how each is made from its number."""
    plan = make_plan(loaded)
    claim = scheduler_claim(sender.backend.name, loaded.spec.model_dump_json(), plan)

    def made(attempt: int) -> Submission:
        return submission_of(
            loaded, plan, attempt=attempt, image=sender.image, claim=claim, reason=reason
        )

    return claim, made


def refuse(backend: LaunchBackend, submission: Submission) -> None:
    """Raise with every reason why a submission must not be sent.

    Raises:
        LaunchRefused: naming each.
    """
    problems = backend.check(submission)
    owned = owned_names(submission.environment())
    problems += [f"{name} belongs to the launcher and may not be set" for name in owned]
    if problems:
        raise LaunchRefused("; ".join(problems), problems=len(problems))


def is_reachable(loaded: LoadedRun, root: RunRoot) -> bool:
    """The output root can be read and written from this host: its mount is there.

    Never found out by trying: making the folder would make a mount point that is none.
    """
    launch = loaded.spec.launch
    covering = [m for m in launch.mount_paths if f"{root.path}/".startswith(f"{m.rstrip('/')}/")]
    return any(Path(mount).is_dir() for mount in covering)


def _standing_submission(
    sender: Sender,
    root: RunRoot,
    spec_json: str,
    lost_attempt: int | None,
    made: Callable[[int], Submission],
) -> Submission | None:
    """The attempt we claimed and whose answer was lost: sent again under its own number.

    Not where its job has begun, or another attempt came after it: then history says what follows.
    """
    ours = sender.receipts.of_root(root.path)
    if not ours or ours[-1].job is not None or ours[-1].attempt == lost_attempt:
        return None
    last, newest = ours[-1], newest_claimed(root)
    is_same = last.spec_digest == spec_digest(spec_json)
    is_open = newest is not None and newest.number == last.attempt and not newest.attempt.exists()
    return made(last.attempt) if is_same and is_open else None


def _ended_unowned(asked: Asked, sender: Sender, made: Callable[[int], Submission]) -> bool:
    """Whether the job of an attempt is over that never owned the run: no history will say so.

    Its image, its host or its group was refused before its guard began, or a person canceled it.
    """
    claim = asked.claim
    if claim is None or claim.launcher != sender.backend.name:
        return False
    if any(isinstance(r, EpochRecord) and r.attempt == asked.attempt for r in asked.records):
        return False
    receipt = _receipt(made(asked.attempt), sender)
    receipt = sender.receipts.read(receipt.run, Path(receipt.root), receipt.attempt) or receipt
    standing = sender.backend.look(receipt)
    was_there = standing.is_known or receipt.job is not None
    return was_there and standing.kind.is_over and all(each.kind.is_over for each in standing.ranks)


def _was_never_sent(
    asked: Asked,
    root: RunRoot,
    ours: Claim,
    sender: Sender,
    made: Callable[[int], Submission],
) -> bool:
    """Whether a number was claimed for another run file by somebody who died before the call.

    The same run file is simply sent again, under that number. Should it be sent after all, the
    lease and the order of the attempts leave one of the two.
    """
    attempt, claim = root.attempt(asked.attempt), asked.claim
    if claim is None or claim.launcher != ours.launcher or claim.spec_digest == ours.spec_digest:
        return False
    if attempt.attempt.exists():
        return False
    if sender.clock.time() - attempt.claim.stat().st_mtime < SENT_WITHIN_S:
        return False
    return not sender.backend.look(_receipt(made(asked.attempt), sender)).is_known


def _next_by_receipts(sender: Sender, root: RunRoot, lost_attempt: int | None) -> int:
    """The attempt's number where the root cannot be read: the job's name settles a race."""
    ours = sender.receipts.of_root(root.path)
    if not ours:
        return 1 if lost_attempt is None else lost_attempt + 1
    last = ours[-1]
    if last.job is None:
        return last.attempt  # its answer was lost; the same name finds it
    return last.attempt + 1 if last.attempt == lost_attempt else last.attempt


def _follow(
    launch: Launch, root: RunRoot, sender: Sender, made: Callable[[int], Submission]
) -> Launch:
    """Attached to what somebody else submitted: a receipt lets us see it through as well.

    Until the job has begun its submitter may have died between claim and call: the same thing goes
    out under the same name, and one of the two starts it.
    """
    attempt = root.attempt(launch.attempt)
    submission = made(launch.attempt)
    is_same = launch.how == "attached" and not launch.notice
    if not is_same or read_claim(attempt).launcher != sender.backend.name:
        return launch
    receipt = sender.receipts.read(submission.spec.name, root.path, launch.attempt)
    if receipt is not None and receipt.job is not None:
        return launch
    if not attempt.attempt.exists():
        return _send(submission, sender)
    job = sender.backend.job_of(submission.key)
    if job is not None:  # else there is nothing to see through
        sender.receipts.write(_receipt(submission, sender).model_copy(update={"job": job}))
    return launch


def _send(submission: Submission, sender: Sender) -> Launch:
    if faults.plan is not None:
        faults.plan.reach("launch.receipt")
    receipt = _receipt(submission, sender)
    before = sender.receipts.read(receipt.run, submission.payload.root, receipt.attempt)
    if before is None or before.job is None:
        sender.receipts.write(receipt)
    if faults.plan is not None:
        faults.plan.reach("launch.send")
    submitted = sender.backend.submit(submission)
    if faults.plan is not None:
        faults.plan.reach("launch.sent")
    try:
        theirs = _other_run_file(submission, submitted)
    except ConfigError:
        if before is None or before.job is None:
            sender.receipts.remove(receipt)
        raise
    detail = dict(submitted.detail)
    if submitted.url is not None:
        detail["url"] = submitted.url
    known = {
        "job": submitted.job,
        "detail": detail,
        "spec_digest": theirs or receipt.spec_digest,
        "active_gpus": before.active_gpus if before else None,
        "allocated_gpus": before.allocated_gpus if before else None,
    }
    sender.receipts.write(receipt.model_copy(update=known))
    if faults.plan is not None:
        faults.plan.reach("launch.follow")
    how = "attached" if submitted.was_there else "started"
    notice = submitted.url or ""
    if theirs is not None:
        notice = f"attempt {receipt.attempt} goes on with its own run file; {notice}"
    return Launch(how=how, attempt=receipt.attempt, notice=notice)


def _other_run_file(submission: Submission, submitted: Submitted) -> str | None:
    """The beginning of its digest, where the job that stands under our name follows another one.

    Raises:
        ConfigError: if that is another training.
    """
    if not submitted.was_there or submitted.mark in (None, submission.mark):
        return None
    (spec, _, training), asked = submitted.mark.partition("."), submission.mark.partition(".")[2]
    if training != asked:
        raise ConfigError(
            f"{submission.key} is there and trains something else (training digest {training}, "
            f"asked for {asked}): give the new training another output.root, or stop that one",
            attempt=submission.payload.attempt,
            live=training,
            asked=asked,
        )
    return spec


def _receipt(submission: Submission, sender: Sender) -> LaunchReceipt:
    payload, launch = submission.payload, submission.spec.launch
    return LaunchReceipt(
        key=submission.key,
        run=submission.spec.name,
        root=str(payload.root),
        attempt=payload.attempt,
        backend=sender.backend.name,
        cluster=sender.backend.where,
        spec_digest=payload.claim.spec_digest,
        training_digest=payload.claim.training_digest,
        image=submission.image,
        image_revision=sender.image_revision,
        revision=sender.revision,
        dirty=sender.dirty,
        auto_resume=launch.auto_resume,
        environment=dict(submission.plan.environment),
        requested_gpus=launch.replicas * launch.gpus_per_replica,
        time=sender.clock.time(),
    )
