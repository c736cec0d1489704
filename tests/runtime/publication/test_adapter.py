"""Publications of adapters: a real trainer, real servers, and what may go wrong between them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from runtime.engines.protocol import GenerateRequest, Generation, SamplingSettings
from runtime.errors import ConfigError, PublicationFailed
from runtime.policy import PolicyId
from runtime.publication.adapter import AdapterTransport
from runtime.publication.disk import DiskTransport
from runtime.publication.protocol import Target
from runtime.publication.transaction import Publisher
from runtime.trainer.local import LocalGroup
from runtime.trainer.protocol import Sequence, TrainBatch
from runtime.trainer.settings import LoraSettings, OptimizerSettings, TrainerSettings
from tests.contracts.tiny_models import byte_tokenizer
from tests.runtime.publication.real_engines import engines
from tests.runtime.publication.tiny_engines import Faults, FaultyClient
from tests.runtime.trainer.tiny import make_sequences, tiny_config

P1, P2 = PolicyId(1, 1), PolicyId(1, 2)
LORA = LoraSettings(rank=4, alpha=8.0)
ALSO = LoraSettings(rank=4, alpha=8.0, also=("*embed_tokens*",))
SAMPLING = SamplingSettings(max_new_tokens=24, ignore_eos=True, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    made = tmp_path_factory.mktemp("model")
    torch.manual_seed(7)
    Qwen3ForCausalLM(tiny_config()).save_pretrained(made)
    byte_tokenizer().save(str(made / "tokenizer.json"))
    return made


class Home:
    """A trainer with adapters, a publisher of them, and what was killed."""

    def __init__(self, trainer: LocalGroup, tmp_path: Path) -> None:
        self.trainer = trainer
        self.record = tmp_path / "publications.jsonl"
        self.publisher = Publisher(
            transport=AdapterTransport(trainer, tmp_path), kill=self.kill, record_path=self.record
        )
        self.killed: list[int] = []
        self.update = 0

    async def kill(self, slot: int, incarnation: str, reason: str) -> None:
        self.killed.append(slot)

    async def train(self) -> PolicyId:
        self.update += 1
        batch = TrainBatch(
            update=self.update, sequences=make_sequences(self.update), consumed_digest=""
        )
        await self.trainer.train_step(batch)
        return PolicyId(1, self.update)

    async def publish(self, policy: PolicyId, targets: list[Target]):
        return await self.publisher.publish(policy, targets, mode="refresh")

    def decisions(self) -> list[dict]:
        return [json.loads(line) for line in self.record.read_text().splitlines()]


@asynccontextmanager
async def home(
    folder: Path, tmp_path: Path, lora: LoraSettings | None = LORA, dtype: str = "float32"
) -> AsyncIterator[Home]:
    settings = TrainerSettings(
        lora=lora,
        dtype=dtype,  # type: ignore[arg-type]
        optimizer=OptimizerSettings(lr=3e-2),
        max_mean_logprob_gap=10.0,
    )
    trainer = LocalGroup(settings)
    await trainer.load(str(folder))
    house = Home(trainer, tmp_path)
    try:
        yield house
    finally:
        await house.publisher.close()
        await trainer.shutdown()


async def answer(target: Target, rid: str) -> Generation:
    request = GenerateRequest(rid=rid, input_ids=(5, 6, 7), sampling=SAMPLING)
    (found,) = await target.client.generate(request, deadline_s=60)
    return found


async def scored(trainer: LocalGroup, found: Generation) -> np.ndarray:
    count = len(found.token_ids)
    sequence = Sequence(
        tokens=np.array([5, 6, 7, *found.token_ids], np.int32),
        prompt_len=3,
        logprobs=np.zeros(count, np.float32),
        mask=np.ones(count, np.float32),
        advantage=0.0,
        span_ends=np.array([count], np.int32),
        span_updates=np.array([0], np.int32),
        prefill_update=0,
        group=0,
        is_equal=True,
    )
    return (await trainer.score((sequence,), temperature=1.0))[0]


@pytest.mark.parametrize("lora", [LORA, ALSO])
def test_engines_agree_with_the_trainer_after_every_update(folder, tmp_path, lora):
    async def main():
        async with home(folder, tmp_path, lora) as house, engines(folder, 2) as targets:
            await house.publish(PolicyId(1, 0), targets)
            start = await answer(targets[0], "start")
            for _ in range(3):
                policy = await house.train()
                decision = await house.publish(policy, targets)
                assert [v.slot for v in decision.verified] == [0, 1]
                assert (decision.transport, decision.verified[0].pause) == ("adapter", "in_place")
                for target in targets:
                    assert await target.client.policy() == str(policy)
                    found = await answer(target, f"{policy}")
                    assert [s.policy for s in found.spans] == [policy]
                    np.testing.assert_allclose(
                        found.logprobs, await scored(house.trainer, found), atol=2e-5, rtol=1e-4
                    )
            assert found.logprobs != start.logprobs
            whole = sum(p.numel() for p in Qwen3ForCausalLM(tiny_config()).parameters()) * 4
            assert decision.num_bytes < whole

    anyio.run(main)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_bit_by_bit_what_merged_weights_would_have_been(folder, tmp_path, dtype):
    async def main():
        async with (
            home(folder, tmp_path, dtype=dtype) as house,
            engines(folder, 2, dtype=dtype) as (one, other),
        ):
            policy = await house.train()
            await house.publish(policy, [one])
            whole = Publisher(
                transport=DiskTransport(house.trainer, tmp_path),
                kill=house.kill,
                record_path=tmp_path / "merged.jsonl",
            )
            await whole.publish(policy, [other], mode="refresh")
            mine, theirs = [await answer(target, "r") for target in (one, other)]
            assert (mine.token_ids, mine.logprobs) == (theirs.token_ids, theirs.logprobs)
            await whole.close()

    anyio.run(main)


@pytest.mark.parametrize("kind", ["refuse", "lose", "nothing", "bug"])
def test_one_engine_that_fails_is_gone_and_its_successor_joins_from_the_snapshot(
    folder, tmp_path, kind
):
    async def main():
        async with home(folder, tmp_path) as house, engines(folder, 3) as (good, bad, fresh):
            await house.publish(await house.train(), [good, bad])
            faults = Faults()
            faults.plan[1, "update_adapter"] = kind
            broken = Target(
                slot=1,
                incarnation=bad.incarnation,
                client=FaultyClient(Named(bad.client, 1), faults),  # type: ignore[arg-type]
            )
            decision = await house.publish(await house.train(), [good, broken])
            assert faults.fired == {(1, "update_adapter", kind): 1}
            assert ([v.slot for v in decision.verified], house.killed) == ([0], [1])

            # A new incarnation holds the base and nothing else.
            joined = await house.publisher.bring_up(fresh, P2)
            assert joined.policy == str(P2)
            assert await fresh.client.checksums() == await good.client.checksums()
            mine, theirs = await answer(good, "a"), await answer(fresh, "a")
            assert mine == theirs
            kinds = [(d["kind"], d["outcome"], d["transport"]) for d in house.decisions()]
            assert kinds == [
                ("publication", "published", "adapter"),
                ("publication", "published", "adapter"),
                ("bring_up", "published", "adapter"),
            ]

    anyio.run(main)


class Named:
    """A client with the slot that ``FaultyClient`` asks for."""

    def __init__(self, client, slot: int) -> None:
        self._client = client
        self.slot = slot

    def __getattr__(self, name: str):
        return getattr(self._client, name)


def test_an_adapter_over_another_base_is_never_served(folder, tmp_path):
    """The adapter's own bytes are right; the weights under it are not the trainer's."""
    other = tmp_path / "other"
    torch.manual_seed(8)
    Qwen3ForCausalLM(tiny_config()).save_pretrained(other)

    async def main():
        async with (
            home(folder, tmp_path) as house,
            engines(folder, 1) as (right,),
            engines(other, 1) as (wrong,),
        ):
            stranger = Target(slot=1, incarnation="other", client=wrong.client)
            decision = await house.publish(await house.train(), [right, stranger])
            assert ([v.slot for v in decision.verified], house.killed) == ([0], [1])
            (failed,) = decision.failed
            assert failed.stage == "verify"
            assert "model.embed_tokens.weight" in failed.error

    anyio.run(main)


def test_no_engine_verified_leaves_the_old_policy_and_the_retry_publishes(folder, tmp_path):
    async def main():
        async with home(folder, tmp_path) as house, engines(folder, 1) as targets:
            await house.publish(await house.train(), targets)
            policy, faults = await house.train(), Faults()
            faults.plan[0, "update_adapter"] = "refuse"
            client = FaultyClient(Named(targets[0].client, 0), faults)
            broken = Target(slot=0, incarnation="i0", client=client)  # type: ignore[arg-type]
            with pytest.raises(PublicationFailed, match="no engine was verified"):
                await house.publish(policy, [broken])
            assert (house.publisher.published, house.publisher.is_halted) == (P1, True)
            faults.plan.clear()
            await house.publish(policy, [broken])
            assert (house.publisher.published, house.publisher.is_halted) == (P2, False)
            assert [d["outcome"] for d in house.decisions()] == ["published", "failed", "published"]

    anyio.run(main)


@pytest.mark.parametrize("mode", ["drain", "rolling"])
def test_the_other_modes_bring_adapters_too(folder, tmp_path, mode):
    waited: list[str] = []

    async def drain() -> None:
        waited.append("all")

    async def rest(target: Target) -> None:
        waited.append(str(target.slot))

    async def main():
        async with home(folder, tmp_path) as house, engines(folder, 2) as targets:
            for _ in range(2):
                policy = await house.train()
                decision = await house.publisher.publish(
                    policy, targets, mode=mode, drain=drain, rest=rest
                )
                assert all(v.flushed for v in decision.verified)
                found = [await answer(target, "r") for target in targets]
                assert found[0].logprobs == found[1].logprobs
                assert {s.policy for f in found for s in f.spans} == {policy}

    anyio.run(main)
    assert waited == (["all"] * 2 if mode == "drain" else ["0", "1"] * 2)


def test_a_resumed_trainer_brings_a_fresh_engine_where_the_last_one_was(folder, tmp_path):
    """A commit holds adapters alone; an engine of the next epoch starts with the base."""
    commit = tmp_path / "commit"
    commit.mkdir()

    async def main():
        async with home(folder, tmp_path) as house, engines(folder, 1) as (before,):
            for _ in range(2):
                await house.publish(await house.train(), [before])
            await house.trainer.write_staged(await house.trainer.stage(), str(commit))
            wanted = await answer(before, "r")
        async with home(folder, tmp_path) as house, engines(folder, 1) as (fresh,):
            await house.trainer.restore(str(commit))
            await house.publish(PolicyId(2, 2), [fresh])
            found = await answer(fresh, "r")
        assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs)
        assert (wanted.prefill, found.prefill) == (P2, PolicyId(2, 2))

    anyio.run(main)


def test_a_trainer_without_adapters_touches_no_engine(folder, tmp_path):
    async def main():
        async with home(folder, tmp_path, None) as house, engines(folder, 1) as targets:
            with pytest.raises(ConfigError, match=r"lora\.rank is 0"):
                await house.publish(P1, targets)
            assert await targets[0].client.policy() == "default"

    anyio.run(main)
