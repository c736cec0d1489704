"""Who may launch the next attempt of a run, who attaches, and who is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from runtime import faults
from runtime.clock import Clock
from runtime.errors import ConfigError
from runtime.rundir import atomic, history
from runtime.rundir.attempt import Claim
from runtime.rundir.chain import Chain
from runtime.rundir.claims import (
    claim_attempt,
    find_claim,
    newest_claimed,
    pending_of,
    read_claim,
)
from runtime.rundir.layout import AttemptDir, RunRoot
from runtime.rundir.presence import Presence
from runtime.rundir.processes import HostBoot
from runtime.rundir.records import EpochRecord, Record

_MOST_DIFFERENCES = 20
_HIDDEN = ("launch.env", "launch.secrets")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What came of asking for a run."""

    how: Literal["started", "attached", "complete"]
    attempt: int
    """The attempt that runs, or (complete) the last one that did."""
    notice: str = ""
    """What the asker should know: the live attempt follows another file of the same training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which attempt it is that is asked for; nothing is taken by asking."""

    how: Literal["started", "attached", "complete"]
    """``started``: nobody has its number, as far as was seen."""
    attempt: int
    records: tuple[Record, ...]
    """The chain it was judged by."""
    claim: Claim | None = None
    """Whose it is, where it is attached to."""


def spec_digest(spec_json: str) -> str:
    """SHA-256 over the canonical form of a resolved run file."""
    canonical = json.dumps(json.loads(spec_json), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def ask(root: RunRoot, *, clock: Clock, here: HostBoot, lost_attempt: int | None = None) -> Asked:
    """Which attempt asking for a run means now. Takes, writes and starts nothing.

    Args:
        root: the run.
        clock: of this process.
        here: this host and boot.
        lost_attempt: see ``win_or_attach``.

    Raises:
        StoreError: if the claim of the live attempt cannot be read.
    """
    # Looked for once, and before the chain is read: who claims after this look has the number that
    # we ask for, and so is attached to, however far it has come meanwhile.
    newest = newest_claimed(root)
    records = Chain(root).read()
    epoch = history.newest_epoch(records)
    last = epoch.attempt if epoch else 0
    if history.is_complete(records):
        return Asked(how="complete", attempt=last, records=records)
    if newest is not None and lost_attempt is not None and newest.number > lost_attempt:
        # Made by us or by another, and it may be over again by now: whether one more follows,
        # whoever looks at that one decides.
        claim = find_claim(newest)
        if claim is not None:
            return Asked(how="attached", attempt=newest.number, records=records, claim=claim)
    waiting = pending_of(newest, records, here)
    # One before it may have been lost by mistake, and be back: whoever names a lost attempt has
    # looked for the owner where it can, and the lease decides.
    lost = lost_attempt or 0
    if waiting is not None and not waiting.is_over and waiting.attempt.number > lost:
        number = waiting.attempt.number
        return Asked(how="attached", attempt=number, records=records, claim=waiting.claim)
    is_live = epoch is not None and history.current_end(records) is None and last > lost
    if is_live and Presence(root, clock=clock, here=here).gone(records) is None:
        claim = read_claim(root.attempt(last))
        return Asked(how="attached", attempt=last, records=records, claim=claim)
    # Not of the newest epoch alone: a root that was filled from an object store begins with number
    # 1 again, beside the epochs of the machine that was lost.
    owned = max((r.attempt for r in records if isinstance(r, EpochRecord)), default=0)
    following = max(owned, newest.number if newest else 0) + 1
    return Asked(how="started", attempt=following, records=records)


def win_or_attach(
    root: RunRoot,
    claim: Claim,
    spec_json: str,
    *,
    clock: Clock,
    here: HostBoot,
    lost_attempt: int | None = None,
) -> tuple[Launch, AttemptDir | None]:
    """Claim the next attempt, or find out what to attach to. Idempotent, safe against rivals.

    Args:
        root: the run.
        claim: ours.
        spec_json: our resolved run file, to name differences.
        clock: of this process.
        here: this host and boot.
        lost_attempt: an attempt that the caller has found over (by ``ensure``, or because its
            scheduler says so), 0 for none at all: the one after it is asked for. Neither its owner
            nor that of an older one is taken for alive any more; the guard's lease decides in the
            end. A newer one that is there is attached to, however it stands: whoever asks the same
            again, or at the same time, starts no second one. None: the live attempt is asked for,
            or the next one where there is none.

    Returns:
        The launch, and with ``started`` the attempt's folder, won and still empty.

    Raises:
        ConfigError: if the run was made, or is being made, by another training digest.
        StoreError: if the claim to attach to cannot be read.
    """
    root.create()
    asked = ask(root, clock=clock, here=here, lost_attempt=lost_attempt)
    attempt = root.attempt(asked.attempt)
    if asked.how == "complete":
        return Launch(how="complete", attempt=asked.attempt), None
    if asked.claim is not None:
        return _attach(attempt, asked.claim, claim, spec_json), None
    _refuse_other_training(root, asked.records, claim, spec_json)
    if faults.plan is not None:
        faults.plan.reach("launch.claim")
    standing = claim_attempt(attempt, claim)
    if standing != claim:
        return _attach(attempt, standing, claim, spec_json), None
    return Launch(how="started", attempt=attempt.number), attempt


def differences(ours: str, theirs: str) -> list[str]:
    """Dotted fields in which two run files (JSON) differ, with both values, ours last.

    Values of the job's environment are not told: this goes into messages and records.
    """
    a, b = dict(_leaves(json.loads(theirs))), dict(_leaves(json.loads(ours)))
    fields = [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]
    shown = [
        f"{n}: differs"
        if n.startswith(_HIDDEN)
        else f"{n}: {a.get(n, 'absent')} -> {b.get(n, 'absent')}"
        for n in fields
    ]
    if len(shown) > _MOST_DIFFERENCES:
        shown = [*shown[:_MOST_DIFFERENCES], f"and {len(shown) - _MOST_DIFFERENCES} more"]
    return shown


def _attach(attempt: AttemptDir, standing: Claim, ours: Claim, spec_json: str) -> Launch:
    if standing.training_digest != ours.training_digest:
        raise ConfigError(
            f"attempt {attempt.number} of this run trains something else "
            f"(training digest {standing.training_digest[:12]}, asked for "
            f"{ours.training_digest[:12]}); {_named(attempt, spec_json)}; give the new training "
            "another output.root, or stop that one",
            attempt=attempt.number,
            live=standing.training_digest,
            asked=ours.training_digest,
        )
    notice = ""
    if standing.spec_digest != ours.spec_digest:
        notice = (
            f"attempt {attempt.number} goes on with its own run file; {_named(attempt, spec_json)}"
        )
    return Launch(how="attached", attempt=attempt.number, notice=notice)


def _refuse_other_training(
    root: RunRoot, records: tuple[Record, ...], claim: Claim, spec_json: str
) -> None:
    """What is committed decides; before commit 0 every start is fresh by definition."""
    commit = history.newest_commit(records)
    if commit is None or commit.training_digest == claim.training_digest:
        return
    made_by = history.newest_epoch(records[: commit.seq])
    where = _named(root.attempt(made_by.attempt), spec_json) if made_by else "fields unknown"
    raise ConfigError(
        f"this run was trained to update {commit.update} with training digest "
        f"{commit.training_digest[:12]}, asked for {claim.training_digest[:12]}; {where}; put the "
        "fields back, or give the new training another output.root",
        committed=commit.training_digest,
        asked=claim.training_digest,
    )


def _named(attempt: AttemptDir, spec_json: str) -> str:
    theirs = atomic.read_bytes(attempt.run)
    if theirs is None:
        return "its run file cannot be read from here"
    return "differs in " + "; ".join(differences(spec_json, theirs.decode()))


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in cast("Mapping[str, object]", value).items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, json.dumps(value, sort_keys=True)
