"""The replicas of a job: which of them this one is, and what it does in the group."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from configs.run import RunSpec
from configs.runtime_lock import read_lock
from runtime.errors import ConfigError, GroupIncomplete, PreflightFailed
from runtime.launch.preflight import corrected
from runtime.launch.rendezvous import Head, Rendezvous, Replica, host_of, new_nonce
from runtime.launch.submission import Payload
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.rundir.layout import AttemptDir
from runtime.session.cluster import STORE_BYTES, ray_settings

RANK, SIZE = "BEAKER_REPLICA_RANK", "BEAKER_REPLICA_COUNT"
IMAGE = "MILEPOST_IMAGE"
GROUP_ADDRESS = "MILEPOST_GROUP_ADDRESS"
"""Handed to the guard: where the other replicas reach this host."""
GRACE_S = 60.0
"""From SIGTERM to SIGKILL; a follower stays five seconds less."""
_POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rank and size of a replica group."""

    rank: int
    size: int

    @classmethod
    def of(cls, environ: Mapping[str, str], *, backend: str) -> Self:
        """Read them from the scheduler's environment.

        A job of a Ray cluster is one process, whose nodes are Ray's affair.

        Raises:
            ConfigError: if they are inconsistent, or only one of them is there.
        """
        if backend != "beaker":
            return cls(rank=0, size=1)
        rank, size = environ.get(RANK), environ.get(SIZE)
        if rank is None and size is None:
            return cls(rank=0, size=1)
        try:
            found = cls(rank=int(rank or ""), size=int(size or ""))
        except ValueError as error:
            raise ConfigError(f"{RANK}={rank!r} and {SIZE}={size!r} name no replica") from error
        if not 0 <= found.rank < found.size:
            raise ConfigError(f"{RANK}={rank} of {SIZE}={size}: no such replica")
        return found


def lead(group: Group, attempt: AttemptDir, payload: Payload) -> dict[str, str]:
    """Rank 0: wait until all replicas are there and fit together; the guard's environment.

    Raises:
        GroupIncomplete: if ranks are missing at the deadline.
        ConfigError: if one does not fit the others.
    """
    spec = RunSpec.model_validate_json(payload.run)
    if spec.launch.replicas != group.size:
        raise ConfigError(f"the run has {spec.launch.replicas} nodes, the job {group.size}")
    meeting = Rendezvous.of(attempt)
    mine = meeting.announce(_replica(group, spec, payload))
    meeting.gather(group.size, spec.launch.synchronized_start_timeout)
    return {GROUP_ADDRESS: mine.address}


def serve(
    group: Group, attempt: AttemptDir, payload: Payload, settled: Mapping[str, str | None]
) -> int:
    """Any other rank: join the leader's Ray and stay until the attempt has ended.

    Returns:
        0 when the leader wrote the attempt's end, 1 when it or its Ray was lost.

    Raises:
        GroupIncomplete: if no leader takes us in.
    """
    spec = RunSpec.model_validate_json(payload.run)
    deadline_s = spec.launch.synchronized_start_timeout
    _wait_for(attempt, deadline_s)
    meeting = Rendezvous.of(attempt)
    mine = meeting.announce(_replica(group, spec, payload))
    head = meeting.find_head(mine, deadline_s)
    follower = _Follower(attempt, meeting, head)
    signal.signal(signal.SIGTERM, follower.on_signal)
    return follower.run(
        _raylet(head, mine, spec.launch.gpus_per_replica), corrected(os.environ, settled)
    )


def own_address() -> str:
    """This host's address, as other hosts reach it.

    That of its route outwards; without one, of its first interface that is up. Never its name's:
    many hosts call themselves by a loopback address.

    Raises:
        PreflightFailed: if it has none but loopback.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: connecting only lets the kernel choose a route.
            probe.connect(("198.51.100.1", 9))
            return probe.getsockname()[0]
        except OSError:
            pass  # no route leads out: its interfaces are asked
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses if name in up else ():
            if each.family is socket.AF_INET and not each.address.startswith("127."):
                return each.address
    raise PreflightFailed("this replica has no address that another one could reach")


def _replica(group: Group, spec: RunSpec, payload: Payload) -> Replica:
    return Replica(
        rank=group.rank,
        size=group.size,
        host=host_of(os.environ, socket.gethostname()),
        address=own_address(),
        gpus=spec.launch.gpus_per_replica,
        lock=read_lock().digest,
        image=os.environ.get(IMAGE, ""),
        spec_digest=payload.claim.spec_digest,
        nonce=new_nonce(),
    )


def _wait_for(attempt: AttemptDir, deadline_s: float) -> None:
    """The leader takes the attempt first: before that there is no folder to write into."""
    until = time.monotonic() + deadline_s
    while not attempt.attempt.exists():
        if time.monotonic() > until:
            raise GroupIncomplete(f"the leader did not begin the attempt within {deadline_s:g} s")
        time.sleep(_POLL_S)


def _raylet(head: Head, mine: Replica, gpus: int) -> list[str]:
    return [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block",
        f"--address={head.address}", f"--node-ip-address={mine.address}", f"--num-gpus={gpus}",
        f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats",
    ]  # fmt: skip


def _take_down(raylet: subprocess.Popen[bytes]) -> None:
    """End a node's Ray: asked first, and nothing of it is left in the end."""
    import psutil

    tree: list[psutil.Process] = []
    with suppress(psutil.Error):
        tree = psutil.Process(raylet.pid).children(recursive=True)
    raylet.terminate()
    try:
        raylet.wait(10)
    except subprocess.TimeoutExpired:
        raylet.kill()
        raylet.wait()
    for each in tree:
        with suppress(psutil.Error):  # it is gone, as it should be
            each.kill()


class _Follower:
    """A replica that lends its node to the leader's Ray."""

    def __init__(self, attempt: AttemptDir, meeting: Rendezvous, head: Head) -> None:
        self._chain = Chain(attempt.root)
        self._epoch = head.epoch
        self._token = head.token
        self._watch = meeting.watch_head()
        self._told_at: float | None = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Stay on after SIGTERM: the commit still needs its ranks."""
        del number, frame
        self._told_at = self._told_at or time.monotonic()

    def run(self, argv: list[str], environ: Mapping[str, str]) -> int:
        """Lend the node until the end record, the leader's silence, or the grace."""
        raylet = subprocess.Popen(
            argv,
            env={**environ, **ray_settings(Path(self._token))},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=Path("/"),
        )
        try:
            while raylet.poll() is None:
                if self._has_ended():
                    return 0
                if self._watch.is_gone():
                    sys.stderr.write("milepost: the leader has not been heard of for a minute\n")
                    return 1
                if self._told_at is not None and time.monotonic() - self._told_at > GRACE_S - 5:
                    return 1
                time.sleep(_POLL_S)
            return 0 if self._has_ended() else 1
        finally:
            _take_down(raylet)

    def _has_ended(self) -> bool:
        records = self._chain.read()
        epoch = history.newest_epoch(records)
        if epoch is None or epoch.epoch < self._epoch:
            return False
        return epoch.epoch > self._epoch or history.current_end(records) is not None
