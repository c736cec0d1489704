"""The producer with nothing replaced: embedded engine, verifier processes, publications."""

import anyio
import pytest
import torch

from runtime.data.samples import Prompt
from runtime.engines.client import HttpEngineClient
from runtime.engines.embedded.server import Server
from runtime.engines.embedded.settings import EngineSettings
from runtime.engines.protocol import GenerateRequest, SamplingSettings
from runtime.policy import PolicyId
from runtime.rewards.verifiers import VerifierSpec
from runtime.rewards.workers import VerifierPool
from tests.contracts.tiny_models import save_model, tiny_qwen3
from tests.runtime.rollout.live import EPOCH, LiveRun

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    torch.set_num_threads(1)
    return str(save_model(tiny_qwen3(0), tmp_path_factory.mktemp("model")))


def prompt(prompt_id):
    return Prompt(
        id=prompt_id, token_ids=(1, 2, 3 + prompt_id.index), text="", answer="1",
        verifier="exact_match",
    )  # fmt: skip


async def test_collections_come_through_real_engine_and_verifiers_over_publications(model_path):
    settings = EngineSettings(model_path=model_path, weight_version=f"e{EPOCH}.u0")
    async with (
        Server(settings) as server,
        HttpEngineClient(server.url) as client,
        VerifierPool([VerifierSpec(name="exact_match")], workers=1) as verifiers,
    ):
        run = LiveRun(
            client,
            await client.info(),
            num_prompts=9,
            prompt=prompt,
            judge=verifiers,
            max_new_tokens=24,
            seed=5,
            max_staleness=2,
        )

        async def publish(update):
            # In place and abort in turn: responses of either kind must tile and validate.
            await client.pause("in_place" if update % 2 else "abort")
            await client.set_policy(PolicyId(EPOCH, update))
            await client.resume()

        async with run.running():
            taken = await run.train(on_update=publish)
    groups = [group for collection in taken for group in collection.groups]
    assert [len(collection.groups) for collection in taken] == [2, 2, 2, 2, 1]
    for update, collection in enumerate(taken):
        assert all(update - group.oldest.update <= 2 for group in collection.groups)
    assert len({s.token_ids for g in groups for s in g.samples}) == 18, "seeds differ"
    counts = run.ledger.counts()
    assert (counts.consumed, counts.pending, counts.lost) == (9, 0, 0)
    assert run.errors.values()["errors/window_failed_groups"] == 0


async def test_evaluation_shares_the_engine_behind_the_gate(model_path):
    settings = EngineSettings(model_path=model_path, weight_version=f"e{EPOCH}.u0")
    async with Server(settings) as server, HttpEngineClient(server.url) as client:
        run = LiveRun(client, await client.info(), num_prompts=6, prompt=prompt, max_staleness=2)
        request = GenerateRequest(
            rid="evaluation-0", input_ids=(1, 2), sampling=SamplingSettings(max_new_tokens=4)
        )
        async with run.running():
            await run.wait_until(lambda: run.ledger.counts().pending > 0)
            async with run.gate.evaluation(drain_deadline_s=20, max_calls=1) as admission:
                assert (await client.load()).running == 0, "the engine is evaluation's alone"
                async with admission.call():
                    answers = await client.generate(request, deadline_s=20)
                assert len(answers[0].token_ids) == 4
            with anyio.fail_after(20):
                taken = await run.train(on_update=lambda update: republish(client, update))
    assert sum(len(collection.groups) for collection in taken) == 6
    assert run.ledger.counts().requeued == 0


class Noting(HttpEngineClient):
    """The client; keeps the names of what it was asked for."""

    def __init__(self, url):
        super().__init__(url)
        self.rids = []

    async def generate(self, request, *, deadline_s):
        self.rids.append(request.rid)
        return await super().generate(request, deadline_s=deadline_s)


async def test_prompts_that_wait_out_an_evaluation_are_the_same_and_none_is_sampled_again(
    model_path, monkeypatch
):
    settings = EngineSettings(model_path=model_path, weight_version=f"e{EPOCH}.u0")
    async with Server(settings) as server, Noting(server.url) as client:
        run = LiveRun(client, await client.info(), num_prompts=6, prompt=prompt, max_staleness=2)

        def waiting():
            pending = run.ledger.snapshot().pending
            return dict(zip(pending.ids(), pending.attempt, strict=True))

        async def refresh(update):
            await client.pause("in_place")
            await client.set_policy(PolicyId(EPOCH, update))
            await client.resume()

        admit, admitted = run.ledger.admit, []

        def admit_and_shut():
            # Shut between the admission of groups and the first step of their calls.
            admitted.append(admit())
            if len(admitted) == 4:
                run.gate.shut("evaluation")
            return admitted[-1]

        monkeypatch.setattr(run.ledger, "admit", admit_and_shut)
        async with run.running():
            await run.wait_until(lambda: run.gate.waiters == 4)
            before = waiting()
            async with run.gate.evaluation(drain_deadline_s=20, max_calls=1) as admission:
                async with admission.call():
                    request = GenerateRequest(
                        rid="evaluation",
                        input_ids=(1,),
                        sampling=SamplingSettings(max_new_tokens=4),
                    )
                    await client.generate(request, deadline_s=20)
                assert (waiting(), run.gate.waiters) == (before, 4)
                assert client.rids == ["evaluation"]
            assert before.items() <= waiting().items()
            with anyio.fail_after(20):
                taken = await run.train(on_update=refresh)
    consumed = {g.prompt.id: g.attempt for collection in taken for g in collection.groups}
    assert consumed == dict.fromkeys(consumed, 1)
    assert before.items() <= consumed.items()
    assert len(consumed) == 6
    # A request a group, each sent once.
    assert sorted(client.rids[1:]) == sorted(f"e{EPOCH}-{p}-1-1" for p in consumed)
    assert run.ledger.counts().requeued == 0


async def republish(client, update):
    await client.set_policy(PolicyId(EPOCH, update))
