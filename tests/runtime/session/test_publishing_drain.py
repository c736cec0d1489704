"""How long a publication in mode ``drain`` waits; the waiting takes no time."""

from types import SimpleNamespace

import anyio
import pytest

from runtime.clock import ManualClock, SystemClock
from runtime.engines.pool import EnginePool
from runtime.engines.protocol import EngineAddress
from runtime.policy import PolicyId
from runtime.publication.disk import DiskTransport
from runtime.publication.transaction import Publisher
from runtime.rollout.gate import AdmissionGate
from runtime.session.publishing import Publishing, publication_limits
from runtime.waits import MULTIPLIER, stretched
from tests.runtime.publication.tiny_engines import INFO, Journal, TinyEngine, TinyTrainer
from tests.skipping_loop import SkippingLoop

pytestmark = pytest.mark.anyio
POLICY = PolicyId(1, 1)
DRAIN_S = 2400.0
"""Beyond what the publication's own limit of this stage was made for."""


@pytest.fixture
def anyio_backend():
    return "asyncio", {"loop_factory": SkippingLoop}


class Monitor:
    """Nobody looks at engines here."""

    lost_slots = ()

    def pause(self) -> None:
        pass

    resume = pause


def publishing_to(engine: TinyEngine, trainer: TinyTrainer, tmp_path, drain_deadline_s: float):
    pool = EnginePool(1, clock=ManualClock())
    address = EngineAddress(slot=0, incarnation="i0", url=engine.url, pid=1)
    pool.joined(address, INFO, engine)

    async def kill(slot: int, incarnation: str, reason: str) -> None:
        raise AssertionError(reason)

    return Publishing(
        publisher=Publisher(
            transport=DiskTransport(trainer, tmp_path),
            kill=kill,
            record_path=tmp_path / "publications.jsonl",
            limits=publication_limits(drain_deadline_s),
        ),
        pool=pool,
        monitor=Monitor(),
        gate=AdmissionGate(clock=SystemClock()),
        mode="drain",
        drain_deadline_s=stretched("drain", drain_deadline_s),
        lifecycle=SimpleNamespace(record=lambda *_, **__: None),
    )


@pytest.mark.parametrize("multiplier", ["1", "3"])
@pytest.mark.parametrize("is_cut", [False, True])
async def test_requests_run_out_for_as_long_as_the_run_file_allows(
    tmp_path, monkeypatch, is_cut, multiplier
):
    monkeypatch.setenv(MULTIPLIER, multiplier)
    deadline_s = DRAIN_S * float(multiplier)
    engine, trainer = TinyEngine(0, Journal()), TinyTrainer()
    trainer.update = POLICY.update
    it = publishing_to(engine, trainer, tmp_path, DRAIN_S)
    cut = anyio.Event()
    place = await it.gate.enter(cut.set)
    began = anyio.current_time()

    async def request() -> None:
        if is_cut:
            await cut.wait()
            await anyio.sleep(20)  # a client that lets go of it slowly
        else:
            await anyio.sleep(deadline_s - 60)
        it.gate.leave(place)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(request)
        decision = await it.publish(POLICY)
    assert decision.outcome == "published"
    assert cut.is_set() == is_cut
    waited = anyio.current_time() - began
    assert waited == pytest.approx(deadline_s + 20 if is_cut else deadline_s - 60, abs=5)
    assert it.gate.is_open


def test_the_transfer_of_small_weights_is_given_up_sooner():
    """Nobody is served meanwhile; and a model nobody could measure keeps the longest limit."""
    limits = [publication_limits(10.0, size).transfer_s for size in (10**6, 10**9, 10**12, None)]
    assert 60.0 < limits[0] < 61.0
    assert limits == sorted(limits)
    assert limits[2] == limits[3] == 600.0
