"""How the replicas of a job find one another, over the shared output root and nothing else.

Every replica writes a record; the leader waits for all of them and compares. Once it owns an epoch
it publishes where its Ray is, with a beat; the others join the newest head that beats, and count
when the leader has acknowledged the nonce of their record. An old address attracts nobody.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from runtime.clock import Clock, SystemClock
from runtime.errors import ConfigError, GroupIncomplete, StoreError
from runtime.rundir import atomic
from runtime.rundir.layout import AttemptDir
from runtime.rundir.liveness import Watch
from runtime.waits import SlowWait, log_slow_wait

BEAT_S = 2.0
FRESH_BEATS = 5
WARN_S = 30.0
_POLL_S = 0.2


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: Literal[1] = 1


R = TypeVar("R", bound=_Record)


class Replica(_Record):
    """What one replica says about itself."""

    rank: int
    size: int
    host: str
    """Its machine, as the scheduler or the kernel calls it; containers of one machine say one."""
    address: str
    """Where the others reach it."""
    gpus: int
    lock: str
    image: str
    spec_digest: str
    nonce: str
    """New for every start of the replica."""
    is_first: bool = False
    """It won the exclusive creation that the file-system probe sets up."""


class Head(_Record):
    """Where the leader's Ray is."""

    epoch: int
    address: str
    token: str
    """File with the cluster's token, readable by this user alone."""
    beat: int
    """Grows while the leader lives."""
    acknowledged: dict[int, str]
    """Rank -> nonce of the replica that the leader counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """One replica's side of the meeting in an attempt's folder."""

    attempt: AttemptDir
    clock: Clock
    sleep: Callable[[float], None] = time.sleep

    @classmethod
    def of(cls, attempt: AttemptDir) -> Rendezvous:
        """With this machine's clock."""
        return cls(attempt=attempt, clock=SystemClock())

    # -- every replica --------------------------------------------------------------------------

    def announce(self, replica: Replica) -> Replica:
        """Write our record, replacing that of an earlier start of this rank.

        Raises:
            ConfigError: if the file system cannot do what the protocol needs.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        written = replica.model_copy(update={"is_first": self._probe(replica)})
        atomic.write_bytes(self._path(replica.rank), written.model_dump_json().encode())
        return written

    def replicas(self) -> dict[int, Replica]:
        """The records there are, by rank; torn or foreign files are left out."""
        found = (_read(path, Replica) for path in self._folder.glob("replica-*.json"))
        return {each.rank: each for each in found if each is not None}

    # -- the leader -----------------------------------------------------------------------------

    def gather(self, size: int, deadline_s: float) -> list[Replica]:
        """Wait for all ranks, then compare them.

        Warns at min(30 s, deadline) and every 30 s, naming the missing ranks.

        Args:
            size: of the group.
            deadline_s: from now.

        Returns:
            The replicas by rank: distinct hosts, equal images and digests.

        Raises:
            GroupIncomplete: if ranks are missing at the deadline.
            ConfigError: if one does not fit the others.
        """
        start = self.clock.monotonic()
        warn_at = min(WARN_S, deadline_s)
        while True:
            found = self.replicas()
            missing = sorted(set(range(size)) - set(found))
            if not missing:
                return checked([found[rank] for rank in range(size)], size)
            waited_s = self.clock.monotonic() - start
            if waited_s >= deadline_s:
                raise GroupIncomplete(
                    f"rank {_list(missing)} of {size} did not come within {deadline_s:g} s; "
                    f"there are {_hosts(found)}",
                    missing=_list(missing),
                )
            if waited_s >= warn_at:
                warn_at += WARN_S
                log_slow_wait(
                    SlowWait(
                        name=f"rank {_list(missing)} of {size}",
                        waited_s=waited_s,
                        deadline_s=deadline_s,
                    )
                )
            self.sleep(_POLL_S)

    def publish(self, head: Head) -> None:
        """Say where the leader's Ray is, and who counts. Called with every beat."""
        folder = self.attempt.epoch(head.epoch)
        folder.mkdir(exist_ok=True)
        atomic.write_bytes(folder / "head.json", head.model_dump_json().encode())

    # -- the others -----------------------------------------------------------------------------

    def head(self) -> Head | None:
        """The head of the newest epoch that published one."""
        folders = sorted(
            (path for path in self.attempt.path.glob("e*") if path.name[1:].isdecimal()),
            key=lambda path: int(path.name[1:]),
        )
        for folder in reversed(folders):
            if (head := _read(folder / "head.json", Head)) is not None:
                return head
        return None

    def find_head(self, replica: Replica, deadline_s: float) -> Head:
        """Wait for a head that beats and has acknowledged us.

        A head is fresh once its beat was seen to grow: an old file never does.

        Raises:
            GroupIncomplete: if there is none at the deadline.
        """
        start = self.clock.monotonic()
        first: Head | None = None
        while True:
            head = self.head()
            if head is not None:
                if first is None or first.epoch != head.epoch:
                    first = head
                is_counted = head.acknowledged.get(replica.rank) == replica.nonce
                if head.beat > first.beat and is_counted:
                    return head
            waited_s = self.clock.monotonic() - start
            if waited_s >= deadline_s:
                what = "published no head" if head is None else "did not acknowledge this replica"
                raise GroupIncomplete(
                    f"the leader {what} within {deadline_s:g} s (rank {replica.rank})"
                )
            self.sleep(_POLL_S)

    def watch_head(self) -> HeadWatch:
        """To know later whether the leader still beats."""
        return HeadWatch(self)

    # -- the file system ------------------------------------------------------------------------

    def _probe(self, replica: Replica) -> bool:
        """Prove rename, exclusive creation and link here; True if this rank came first."""
        folder = self._folder
        own = folder / f"probe-{replica.nonce}"
        try:
            atomic.write_bytes(own, replica.nonce.encode())
            if own.read_bytes() != replica.nonce.encode():
                raise ConfigError(f"{folder}: a file that was just written reads otherwise")
            try:
                os.link(own, folder / "probe-first")
            except FileExistsError:
                is_first = (folder / "probe-first").read_bytes() == replica.nonce.encode()
            else:
                is_first = True
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot hold a run of several nodes: {error.strerror} (rename, exclusive "
                "creation and links are needed)"
            ) from error
        finally:
            own.unlink(missing_ok=True)
        return is_first

    @property
    def _folder(self) -> Path:
        return self.attempt.path / "replicas"

    def _path(self, rank: int) -> Path:
        return self._folder / f"replica-{rank}.json"


class HeadWatch:
    """Whether the leader still beats, by our own clock."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        limit_s = BEAT_S * FRESH_BEATS * 6
        self._watch = Watch(rendezvous.clock, limit_s=limit_s, again_s=BEAT_S)

    def is_gone(self) -> bool:
        """Look once: the beat has not changed for a minute."""
        head = self._rendezvous.head()
        return self._watch.has_lapsed(None if head is None else (head.epoch, head.beat))


def checked(replicas: Sequence[Replica], size: int) -> list[Replica]:
    """The replicas of a group, if they belong together.

    Raises:
        ConfigError: naming the odd one: another size, a shared host, another image, lock or run.
    """
    for name in ("size", "image", "lock", "spec_digest", "gpus"):
        values: list[object] = [getattr(each, name) for each in replicas]
        usual = max(values, key=values.count)
        odd = [r.rank for r, value in zip(replicas, values, strict=True) if value != usual]
        if odd:
            raise ConfigError(
                f"rank {_list(odd)} has another {name.replace('_', ' ')} than the others: "
                f"{values[odd[0]]} instead of {usual}"
            )
    if replicas[0].size != size:
        raise ConfigError(f"the replicas say that they are {replicas[0].size}, the job has {size}")
    by_host: dict[str, int] = {}
    for each in replicas:
        if each.host in by_host and each.gpus > 0:
            raise ConfigError(
                f"rank {by_host[each.host]} and rank {each.rank} are both on {each.host}: the "
                "replicas of a run with GPUs are on hosts of their own"
            )
        by_host[each.host] = each.rank
    winners = [each.rank for each in replicas if each.is_first]
    if len(winners) > 1:
        raise ConfigError(
            f"rank {_list(winners)} all created one file exclusively: this file system keeps no "
            "two nodes apart, and cannot hold a run of several nodes"
        )
    return list(replicas)


def new_nonce() -> str:
    """For one start of a replica."""
    return secrets.token_hex(8)


def host_of(environ: Mapping[str, str], hostname: str) -> str:
    """The machine a replica runs on: its scheduler's name for it, since containers have others."""
    return environ.get("BEAKER_NODE_ID") or environ.get("BEAKER_NODE_HOSTNAME") or hostname


def _read(path: Path, kind: type[R]) -> R | None:
    try:
        data = atomic.read_bytes(path)
        return None if data is None else kind.model_validate(cast("object", json.loads(data)))
    except (ValueError, ValidationError, StoreError, OSError):
        return None


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _hosts(found: Mapping[int, Replica]) -> str:
    named = [f"{rank} on {each.host}" for rank, each in sorted(found.items())]
    return ", ".join(named) or "none"
