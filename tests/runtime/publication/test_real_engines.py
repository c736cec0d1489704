"""Publications to real embedded servers over HTTP, by every transport."""

from __future__ import annotations

from functools import partial

import anyio
import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.engines.bucket_body import memory_body
from runtime.engines.protocol import GenerateRequest, SamplingSettings
from runtime.errors import EngineRefused, PublicationFailed
from runtime.policy import PolicyId
from runtime.publication.broadcast import BroadcastTransport
from runtime.publication.checksum import checksums
from runtime.publication.disk import DiskTransport
from runtime.publication.ipc import IpcTransport
from runtime.publication.transaction import Publisher
from tests.contracts.tiny_models import save_model, tiny_qwen3
from tests.runtime.publication.real_engines import ModelTrainer, engines
from tests.runtime.publication.tiny_engines import Faults, FaultyClient

P1, P2, P3 = PolicyId(1, 1), PolicyId(1, 2), PolicyId(1, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    return save_model(tiny_qwen3(0), tmp_path_factory.mktemp("model"))


class Home:
    """A trainer, a publisher over one transport, and what was killed."""

    def __init__(self, kind: str, folder, tmp_path) -> None:
        self.trainer = ModelTrainer(AutoModelForCausalLM.from_pretrained(folder))
        self.transport = {
            "disk": lambda: DiskTransport(self.trainer, tmp_path),
            "ipc": lambda: IpcTransport(self.trainer, tmp_path),
            "broadcast": lambda: BroadcastTransport(self.trainer, group_timeout_s=4.0),
        }[kind]()
        self.killed: list[int] = []
        self.publisher = Publisher(
            transport=self.transport, kill=self.kill, record_path=tmp_path / "publications.jsonl"
        )

    async def kill(self, slot: int, incarnation: str, reason: str) -> None:
        self.killed.append(slot)

    async def publish(self, policy, targets):
        self.trainer.train()
        return await self.publisher.publish(policy, targets, mode="refresh")

    def weights(self):
        return checksums(self.trainer.model.named_parameters())


@pytest.fixture(params=["disk", "broadcast", "ipc"])
def home(request, folder, tmp_path):
    return partial(Home, request.param, folder, tmp_path)


def test_both_engines_hold_exactly_the_trainers_weights(home, folder):
    async def main():
        house = home()
        async with engines(folder, 2) as targets:
            for policy in (P1, P2, P3):
                decision = await house.publish(policy, targets)
                assert [v.slot for v in decision.verified] == [0, 1]
                for target in targets:
                    assert await target.client.checksums() == house.weights()
                    assert await target.client.policy() == str(policy)
                    assert await target.client.is_alive(timeout_s=20)
            await house.publisher.close()
        assert house.killed == []

    anyio.run(main)


def test_running_requests_go_on_with_spans_of_both_policies(home, folder, monkeypatch):
    async def main():
        house = home()
        async with engines(folder, 1) as targets, anyio.create_task_group() as tasks:
            await house.publish(P1, targets)
            client = targets[0].client
            sampling = SamplingSettings(max_new_tokens=300, ignore_eos=True)
            request = GenerateRequest(
                rid="long", input_ids=(1, 2, 3), sampling=sampling, salt=str(P1)
            )
            got, is_over = [], anyio.Event()

            async def generate():
                got.extend(await client.generate(request, deadline_s=30))
                is_over.set()

            pause, before = client.pause, (await client.load()).generated_tokens

            async def pause_what_runs(*args, **options):
                # Begun here: what is prepared first may take longer than the whole answer.
                tasks.start_soon(generate)
                while (await client.load()).generated_tokens < before + 2:
                    await anyio.lowlevel.checkpoint()
                return await pause(*args, **options)

            monkeypatch.setattr(client, "pause", pause_what_runs)
            decision = await house.publish(P2, targets)
            assert decision.verified[0].pause == "in_place"
            await is_over.wait()
            (generation,) = got
            assert [s.policy for s in generation.spans] == [P1, P2]
            assert generation.spans[-1].end == len(generation.token_ids) == 300
            await house.publisher.close()

    anyio.run(main)


CALLS = {
    "disk": ["pause", "update_from_disk", "checksums", "set_policy", "policy", "resume"],
    "ipc": ["begin_update", "update_from_shared", "end_update", "checksums"],
    "broadcast": [
        "pause", "begin_update", "init_update_group", "update_from_distributed", "end_update",
        "checksums", "set_policy", "policy", "resume",
    ],
}  # fmt: skip
STEPS = [
    (kind, call, how)
    for kind, calls in CALLS.items()
    for call in calls
    for how in ("refuse", "lose")
    # An engine that never joins costs the whole limit of joining: see the next test.
    if call != "init_update_group"
]


@pytest.mark.parametrize(("kind", "call", "how"), STEPS)
def test_one_of_two_engines_failing_at_each_step_is_left_behind(kind, call, how, folder, tmp_path):
    async def main():
        house = Home(kind, folder, tmp_path)
        faults = Faults()
        async with engines(folder, 2) as targets:
            first = [_wrapped(t, faults) for t in targets]
            await house.publish(P1, first)
            faults.plan[1, call] = how
            decision = await house.publish(P2, first)
            assert sum(faults.fired.values()) >= 1
            assert [v.slot for v in decision.verified] == [0]
            assert [f.slot for f in decision.failed] == [1]
            assert house.killed == [1]
            assert await targets[0].client.checksums() == house.weights()
            assert await targets[0].client.policy() == str(P2)
            faults.plan.clear()
            await house.publish(P3, first[:1])
            assert await targets[0].client.checksums() == house.weights()
            await house.publisher.close()

    anyio.run(main)


def test_an_engine_that_does_not_join_the_group_is_left_behind(folder, tmp_path):
    async def main():
        house = Home("broadcast", folder, tmp_path)
        faults = Faults()
        async with engines(folder, 2) as targets:
            wrapped = [_wrapped(t, faults) for t in targets]
            faults.plan[1, "init_update_group"] = "refuse"
            decision = await house.publish(P1, wrapped)
            assert [v.slot for v in decision.verified] == [0]
            assert house.killed == [1]
            assert house.transport.num_groups == 2
            assert await targets[0].client.checksums() == house.weights()
            await house.publisher.close()

    anyio.run(main)


def test_an_engine_stuck_in_the_collective_of_a_dead_peer_is_ended_too(folder, tmp_path):
    """As with NCCL: it has answered its bucket, and then answers nothing any more."""

    async def main():
        house = Home("broadcast", folder, tmp_path)
        house.transport._grace_s = 0.3
        faults = Faults()
        async with engines(folder, 3) as targets:
            wrapped = [_wrapped(t, faults) for t in targets]
            await house.publish(P1, wrapped)
            faults.plan[1, "update_from_distributed"] = "lose"
            faults.plan[2, "destroy_update_group"] = "hang"
            decision = await house.publish(P2, wrapped)
            assert [v.slot for v in decision.verified] == [0]
            assert house.killed == [1, 2]
            assert await targets[0].client.checksums() == house.weights()
            # Nobody left: who hangs is ended all the same, and a retry meets it no more.
            house.killed.clear()
            faults.plan = {
                (0, "update_from_distributed"): "refuse",
                (0, "destroy_update_group"): "hang",
            }
            with pytest.raises(PublicationFailed):
                await house.publish(P3, wrapped[:1])
            assert house.killed == [0]
            await house.publisher.close()

    anyio.run(main)


@pytest.mark.parametrize("kind", ["disk", "broadcast", "ipc"])
def test_when_all_engines_fail_the_retry_publishes(kind, folder, tmp_path):
    async def main():
        house = Home(kind, folder, tmp_path)
        faults = Faults()
        call = {"disk": "update_from_disk", "ipc": "update_from_shared"}.get(
            kind, "update_from_distributed"
        )
        async with engines(folder, 2) as targets:
            wrapped = [_wrapped(t, faults) for t in targets]
            await house.publish(P1, wrapped)
            for slot in (0, 1):
                faults.plan[slot, call] = "refuse"
            with pytest.raises(PublicationFailed):
                await house.publish(P2, wrapped)
            assert house.killed == []
            assert house.publisher.published == P1
            faults.plan.clear()
            decision = await house.publish(P2, wrapped)
            assert [v.slot for v in decision.verified] == [0, 1]
            for target in targets:
                assert await target.client.checksums() == house.weights()
            await house.publisher.close()

    anyio.run(main)


def test_an_engines_refusal_never_hangs_the_trainer(folder, tmp_path):
    """One engine answers 400 at once while the trainer and the other are inside the broadcast."""

    async def main():
        house = Home("broadcast", folder, tmp_path)
        async with engines(folder, 2) as targets:
            await house.publish(P1, targets)
            await targets[1].client.destroy_update_group(house.transport._group.name)
            decision = await house.publish(P2, targets)
            # The group was stale, no engine was at fault: a new one serves both.
            assert [v.slot for v in decision.verified] == [0, 1]
            assert house.transport.num_groups == 2
            for target in targets:
                assert await target.client.checksums() == house.weights()
            await house.publisher.close()

    anyio.run(main)


@pytest.mark.parametrize(("kind", "files"), [("disk", "*.safetensors"), ("ipc", "bucket-*")])
def test_engines_keep_nothing_of_the_files_they_loaded(kind, files, folder, tmp_path):
    """Places are written over: an engine that mapped them would change with them."""

    async def main():
        house = Home(kind, folder, tmp_path)
        async with engines(folder, 1) as targets:
            await house.publish(P1, targets)
            paths = list(tmp_path.glob(f"milepost-*/*/{files}"))
            assert paths
            held = await targets[0].client.checksums()
            for path in paths:
                with path.open("r+b") as file:
                    file.write(b"\0" * path.stat().st_size)
            assert await targets[0].client.checksums() == held == house.weights()
            await house.publisher.close()

    anyio.run(main)


def _wrapped(target, faults: Faults):
    class Engine:
        slot = target.slot
        url = target.client.url

        def __getattr__(self, name):
            return getattr(target.client, name)

    client = FaultyClient(Engine(), faults)
    return type(target)(slot=target.slot, incarnation=target.incarnation, client=client)


@pytest.mark.parametrize("kind", ["disk", "ipc"])
def test_a_restarted_engine_reads_the_snapshot_that_stands(kind, folder, tmp_path):
    async def main():
        house = Home(kind, folder, tmp_path)
        async with engines(folder, 1) as targets, engines(folder, 1) as fresh:
            await house.publish(P1, targets)
            right = house.weights()
            house.trainer.train()  # has gone on; the snapshot has not
            again = type(fresh[0])(slot=1, incarnation="i1b", client=fresh[0].client)
            await house.publisher.bring_up(again, P1)
            assert await again.client.checksums() == right
            await house.publisher.close()

    anyio.run(main)


@pytest.mark.parametrize(
    "change",
    [
        {"path": "/etc/hostname"},
        {"path": None},
        {"num_bytes": 10**9},
        {"tensors": []},
        {"tensors": [{"name": "x", "dtype": "float32", "shape": [-1], "start": 0}]},
        {"tensors": [{"name": "x", "dtype": "eval", "shape": [1], "start": 0}]},
        {"tensors": [{"name": "x", "dtype": "float32", "shape": [1], "start": 10**9}]},
    ],
)
def test_an_engine_refuses_memory_that_is_no_bucket_and_lives_on(change, folder, tmp_path):
    async def main():
        house = Home("ipc", folder, tmp_path)
        async with engines(folder, 1) as targets:
            await house.publish(P1, targets)
            client = targets[0].client
            shared = await house.trainer.share_weights(7, str(_scratch(house, 7)))
            body = memory_body(shared.buckets[0])
            body["serialized_named_tensors"][0] |= change
            await client.begin_update()
            with pytest.raises(EngineRefused, match="no shared bucket"):
                await client._update("/update_weights_from_tensor", body)
            await client.end_update()
            assert await client.checksums() == house.weights()
            assert await client.is_alive(timeout_s=20)
            await house.publisher.close()

    anyio.run(main)


def _scratch(house, number):
    folder = house.transport._scratch.path / str(number)
    folder.mkdir(exist_ok=True)
    return folder
