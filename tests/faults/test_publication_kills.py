"""Engines that are killed, as processes, in the middle of a publication."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable

import anyio
import anyio.to_thread
import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.engines.client import HttpEngineClient
from runtime.engines.embedded.owner import EmbeddedOwner
from runtime.engines.embedded.settings import EngineSettings
from runtime.engines.protocol import EngineAddress
from runtime.policy import PolicyId
from runtime.publication.broadcast import BroadcastTransport
from runtime.publication.checksum import checksums
from runtime.publication.disk import DiskTransport
from runtime.publication.protocol import Target
from runtime.publication.transaction import Publisher
from tests.contracts.tiny_models import save_model, tiny_qwen3
from tests.runtime.publication.real_engines import ModelTrainer

P1, P2, P3 = PolicyId(1, 1), PolicyId(1, 2), PolicyId(1, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    return save_model(tiny_qwen3(0), tmp_path_factory.mktemp("model"))


class Engines:
    """Two server processes; a dead one is started again when it is next needed."""

    def __init__(self, folder) -> None:
        settings = EngineSettings(model_path=str(folder))
        self.owners = [EmbeddedOwner(slot=i, settings=settings) for i in (0, 1)]
        self.addresses: list[EngineAddress | None] = [None, None]

    async def address(self, slot: int) -> EngineAddress:
        found = self.addresses[slot]
        if found is None or not self.owners[slot].is_running():
            found = await anyio.to_thread.run_sync(self.owners[slot].start)
            self.addresses[slot] = found
        return found


@pytest.fixture(scope="module")
def engines(folder):
    made = Engines(folder)
    yield made
    for owner in made.owners:
        owner.stop()


class KilledBefore:
    """A client whose engine's process is killed just before one call goes out; counts it."""

    def __init__(self, client: HttpEngineClient, pid: int, call: str) -> None:
        self._client = client
        self._pid = pid
        self.call = call
        self.num_fired = 0

    def __getattr__(self, name: str) -> Callable[..., Awaitable[object]] | str:
        attribute = getattr(self._client, name)
        if name != self.call or self.num_fired:
            return attribute

        async def call(*args: object, **options: object) -> object:
            self.num_fired += 1
            os.kill(self._pid, signal.SIGKILL)
            return await attribute(*args, **options)

        return call


def target_of(address: EngineAddress, client) -> Target:
    return Target(slot=address.slot, incarnation=address.incarnation, client=client)


class House:
    def __init__(self, transport, trainer, tmp_path, engines: Engines) -> None:
        self.engines = engines
        self.trainer = trainer
        self.killed: list[tuple[int, str]] = []
        self.publisher = Publisher(
            transport=transport, kill=self.kill, record_path=tmp_path / "publications.jsonl"
        )

    async def kill(self, slot: int, incarnation: str, reason: str) -> None:
        await anyio.to_thread.run_sync(self.engines.owners[slot].stop)
        self.killed.append((slot, incarnation))

    def train(self) -> dict[str, str]:
        self.trainer.train()
        return checksums(self.trainer.model.named_parameters())

    async def lose_one_in(self, call: str) -> tuple[Target, dict[str, str]]:
        """Publish twice; engine 1 is killed in the second. Returns the other, and its weights."""
        addresses = [await self.engines.address(slot) for slot in (0, 1)]
        clients = [HttpEngineClient(address.url) for address in addresses]
        doomed = KilledBefore(clients[1], addresses[1].pid, "")
        targets = [target_of(addresses[0], clients[0]), target_of(addresses[1], doomed)]
        self.train()
        await self.publisher.publish(P1, targets, mode="refresh")
        doomed.call = call
        right = self.train()
        decision = await self.publisher.publish(P2, targets, mode="refresh")
        assert doomed.num_fired == 1
        assert [v.slot for v in decision.verified] == [0]
        assert (decision.failed[0].slot, decision.failed[0].stage) == (1, "transfer")
        assert self.killed == [(1, addresses[1].incarnation)]
        assert await clients[0].checksums() == right
        assert await clients[0].is_alive(timeout_s=30)
        await clients[1].close()
        return targets[0], right


@pytest.fixture
def trainer(folder):
    return ModelTrainer(AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.timeout(180)  # three interpreters with torch start here
def test_an_engine_killed_in_a_load_is_left_behind_and_brought_up_again(engines, trainer, tmp_path):
    async def main():
        house = House(DiskTransport(trainer, tmp_path), trainer, tmp_path, engines)
        survivor, right = await house.lose_one_in("update_from_disk")
        again = await engines.address(1)
        assert again.incarnation != house.killed[0][1]
        async with HttpEngineClient(again.url) as client:
            fresh = target_of(again, client)
            newer = house.train()  # the trainer moves on; the published snapshot stands
            await house.publisher.bring_up(fresh, P2)
            assert await client.checksums() == right
            assert await client.policy() == str(P2)
            decision = await house.publisher.publish(P3, [survivor, fresh], mode="refresh")
            assert [v.slot for v in decision.verified] == [0, 1]
            assert await client.checksums() == await survivor.client.checksums() == newer
        await survivor.client.close()
        await house.publisher.close()

    anyio.run(main)


@pytest.mark.timeout(180)
def test_an_engine_killed_in_a_broadcast_neither_hangs_the_trainer_nor_spoils_the_other(
    engines, trainer, tmp_path
):
    async def main():
        transport = BroadcastTransport(trainer, group_timeout_s=5.0)
        house = House(transport, trainer, tmp_path, engines)
        survivor, _ = await house.lose_one_in("update_from_distributed")
        right = house.train()
        await house.publisher.publish(P3, [survivor], mode="refresh")
        assert await survivor.client.checksums() == right
        await survivor.client.close()
        await house.publisher.close()

    anyio.run(main)
