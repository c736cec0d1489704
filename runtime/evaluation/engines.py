"""Engines of an evaluation's own: started beside it, verified at the snapshot's policy, ended."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import structlog

from configs.run import RunSpec
from runtime.clock import Clock
from runtime.engines.client import HttpEngineClient
from runtime.engines.factory import engine_owner
from runtime.engines.health import health_settings
from runtime.engines.local_slot import LocalSlot
from runtime.engines.monitor import HealthMonitor
from runtime.engines.pool import EnginePool
from runtime.engines.protocol import EngineAddress
from runtime.engines.slots import LiveEngine, SlotState
from runtime.errors import EngineDead, RunError
from runtime.evaluation.snapshots import Weights
from runtime.policy import PolicyId
from runtime.telemetry.events import Event

_log: structlog.stdlib.BoundLogger = structlog.get_logger("evaluation")
_LOOK_S = 0.5


class EngineUnhealthy(EngineDead):
    """No engine of an evaluation reached the snapshot's policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnEngines:
    """The engines that one evaluation has to itself."""

    pool: EnginePool
    monitor: HealthMonitor
    policy: PolicyId
    weights: Weights

    async def until_available(self, *, deadline_s: float) -> None:
        """Wait until an engine is verified: a dead one may be about to come back.

        Raises:
            EngineUnhealthy: if none is within the deadline, or none will be started again.
        """
        with anyio.move_on_after(deadline_s):
            while not self.pool.is_available:
                if len(self.monitor.lost_slots) == len(self.pool.views()):
                    break
                await anyio.sleep(_LOOK_S)
        if not self.pool.is_available:
            reasons = "; ".join(view.reason for view in self.pool.views() if view.reason)
            raise EngineUnhealthy(
                f"no engine reached {self.policy} within {deadline_s:g} s: {reasons or 'no reason'}"
            )

    async def verify_for_ever(self) -> None:
        """Verify every engine that has none of it yet, restarted ones too; until cancelled."""
        while True:
            for engine in self.pool.live():
                if engine.state is SlotState.STALE:
                    await self._verify(engine)
            await anyio.sleep(_LOOK_S)

    async def _verify(self, engine: LiveEngine) -> None:
        """It started from the snapshot: that it holds exactly these weights is shown by name."""
        try:
            found = await engine.client.checksums()
            wrong = _differences(self.weights.receipt.checksums, found)
            if wrong:
                reason = f"{len(wrong)} weights differ from the snapshot's: {wrong[:3]}"
                await self.monitor.kill(engine.slot, engine.incarnation, reason)
                return
            await engine.client.set_policy(self.policy)
            self.pool.mark_verified(engine.slot, engine.incarnation, self.policy)
        except RunError as error:
            _log.warning(Event.REQUEST_FAILED, slot=engine.slot, error=error.message)


@asynccontextmanager
async def own_engines(
    spec: RunSpec,
    weights: Weights,
    policy: PolicyId,
    *,
    logs: Path,
    threads: int,
    start_deadline_s: float,
    clock: Clock,
) -> AsyncGenerator[OwnEngines, None]:
    """Start the run file's engines from a snapshot, without Ray; all are gone afterwards.

    Args:
        spec: the run file.
        weights: the snapshot.
        policy: what requests and engines call it.
        logs: folder of the servers' logs.
        threads: of an engine's arithmetic, on CPU.
        start_deadline_s: for the first engine to be verified.
        clock: of this process.

    Raises:
        EngineUnhealthy: if none reached the policy.
    """
    api_key = secrets.token_hex(16)
    slots = range(spec.rollout.engines)
    pool = EnginePool(len(slots), clock=clock)
    runners = {
        slot: LocalSlot(
            owner=engine_owner(
                spec,
                model=str(weights.folder),
                slot=slot,
                api_key=api_key,
                log_path=logs / f"engine-{slot}.log",
                threads=threads,
            )
        )
        for slot in slots
    }
    connect = partial(_connect, api_key)
    settings = health_settings(spec.health)
    monitor = HealthMonitor(pool, runners, settings, connect=connect, clock=clock)
    engines = OwnEngines(pool=pool, monitor=monitor, policy=policy, weights=weights)
    pool.serve(policy)
    try:
        try:
            await monitor.start_engines()
        except RunError as error:
            raise EngineUnhealthy(f"no engine for {policy}: {error.message}") from error
        async with anyio.create_task_group() as tasks:
            await tasks.start(monitor.run)
            tasks.start_soon(engines.verify_for_ever)
            await engines.until_available(deadline_s=start_deadline_s)
            yield engines
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await monitor.stop()


def _connect(api_key: str, address: EngineAddress) -> HttpEngineClient:
    return HttpEngineClient(address.url, api_key=api_key)


def _differences(wanted: dict[str, str], found: dict[str, str]) -> list[str]:
    return sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
