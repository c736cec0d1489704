"""Small engines, a trainer and a publisher over the disk transport."""

from __future__ import annotations

from runtime.policy import PolicyId
from runtime.publication.disk import DiskTransport
from runtime.publication.limits import PublicationLimits
from runtime.publication.transaction import Publisher
from tests.runtime.publication.tiny_engines import (
    INFO,
    Faults,
    Journal,
    TinyEngine,
    TinyTrainer,
    target,
)

SHORT = PublicationLimits(
    prepare_s=0.4, drain_s=0.1, pause_s=0.4, transfer_s=0.4, verify_s=0.4,
    set_policy_s=0.4, kill_s=0.4, resume_s=0.4,
)  # fmt: skip
"""For calls that hang; long enough for a sound engine on a loaded machine."""
P1, P2 = PolicyId(1, 1), PolicyId(1, 2)


class House:
    """Engines, a trainer and a publisher over the disk transport."""

    def __init__(self, tmp_path, num_engines: int, infos=None, limits=None) -> None:
        self.journal = Journal()
        self.faults = Faults()
        infos = infos or [INFO] * num_engines
        self.engines = [TinyEngine(i, self.journal, infos[i]) for i in range(num_engines)]
        self.trainer = TinyTrainer()
        self.transport = DiskTransport(self.trainer, tmp_path)
        self.kill_error: Exception | None = None
        self.edges = []
        self.publisher = Publisher(
            transport=self.transport,
            kill=self.kill,
            record_path=tmp_path / "publications.jsonl",
            limits=limits or PublicationLimits(),
            stage_log=self.edges.append,
        )
        self.record_path = tmp_path / "publications.jsonl"

    async def kill(self, slot: int, incarnation: str, reason: str) -> None:
        if self.kill_error is not None:
            raise self.kill_error
        assert incarnation == f"i{slot}"
        self.journal.add("kill", slot)
        self.engines[slot].is_dead = True

    @property
    def live(self):
        return [e for e in self.engines if not e.is_dead]

    def targets(self):
        return [target(e, self.faults) for e in self.live]

    async def publish(self, policy: PolicyId, mode="refresh", drain=None, decided=None):
        self.trainer.update = policy.update
        return await self.publisher.publish(
            policy, self.targets(), mode=mode, drain=drain, decided=decided
        )

    def serves(self, engine: TinyEngine, policy: PolicyId) -> bool:
        behind = (self.trainer.update - policy.update) * 100
        right = {n: t - behind for n, t in self.trainer.weights().items()}
        return (
            engine.says == str(policy)
            and engine.paused is None
            and all(engine.weights[n].equal(t) for n, t in right.items())
        )
