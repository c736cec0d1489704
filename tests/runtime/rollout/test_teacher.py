"""A served teacher: who is asked, how often, and what becomes of the group when nobody answers."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from runtime.data.samples import Prompt, PromptId, Sample, Span
from runtime.data.teacher import TeacherScores
from runtime.engines.scoring import ScoreRequest
from runtime.errors import (
    ContractViolation,
    GenerationTimeout,
    OverloadError,
    TransportError,
    UnavailableError,
)
from runtime.policy import PolicyId
from runtime.rollout.teacher import BACKOFF_S, TRIES, ServedTeacher

pytestmark = pytest.mark.anyio

P0 = PolicyId(3, 0)
PROMPT = Prompt(id=PromptId(0, 4), token_ids=(1, 2), text="", answer=None, verifier="none")


def sample(*tokens: int) -> Sample:
    return Sample(
        token_ids=tokens,
        logprobs=(-1.0,) * len(tokens),
        spans=(Span(0, len(tokens), P0),),
        prefill=P0,
        finish="length",
    )


class Server:
    """Answers each token's own id as its log-prob, or what ``behave`` raises."""

    def __init__(self, name: str) -> None:
        self.url = f"http://{name}"
        self.asked: list[ScoreRequest] = []
        self.running = 0
        self.most = 0
        self.behave: Callable[[int], Exception | None] = lambda number: None
        self.go = anyio.Event()
        self.go.set()

    async def score(self, request: ScoreRequest, *, deadline_s: float) -> TeacherScores:
        assert deadline_s == 5.0
        self.asked.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.go.wait()
            await anyio.lowlevel.checkpoint()
        finally:
            self.running -= 1
        if (error := self.behave(len(self.asked))) is not None:
            raise error
        return TeacherScores.of_sampled([-float(t) for t in request.token_ids])


class House:
    def __init__(self, *names: str, concurrency: int = 64) -> None:
        self.servers = [Server(name) for name in names]
        self.pauses: list[float] = []
        self.teacher = ServedTeacher(
            self.servers,
            top_k=0,
            deadline_s=5.0,
            concurrency=concurrency,
            pause=self.pause,
        )

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await anyio.lowlevel.checkpoint()


async def test_each_sample_gets_its_own_scores_in_order():
    house = House("a", "b")
    found = await house.teacher.score(PROMPT, [sample(3), sample(5, 6), sample(7)])
    want = [TeacherScores.of_sampled(v) for v in ([-3.0], [-5.0, -6.0], [-7.0])]
    assert found == want
    asked = [r for s in house.servers for r in s.asked]
    assert {r.prompt_ids for r in asked} == {(1, 2)}
    assert len({r.rid for r in asked}) == 3
    assert sorted(len(s.asked) for s in house.servers) == [1, 2], "shared out"


@pytest.mark.parametrize("error", [TransportError, OverloadError, GenerationTimeout])
async def test_the_same_response_is_asked_for_again_elsewhere(error):
    house = House("a", "b")
    house.servers[0].behave = lambda number: error("no")
    (found,) = await house.teacher.score(PROMPT, [sample(3)])
    assert found == TeacherScores.of_sampled([-3.0])
    first, second = (s.asked for s in house.servers)
    assert [r.token_ids for r in (*first, *second)] == [(3,), (3,)]
    assert house.pauses == [BACKOFF_S]


async def test_after_its_tries_the_group_is_unavailable():
    house = House("a")
    house.servers[0].behave = lambda number: TransportError("reset")
    with pytest.raises(UnavailableError, match=r"0:4 in 3 tries.*http://a: reset") as caught:
        await house.teacher.score(PROMPT, [sample(3)])
    assert (caught.value.kind, caught.value.detail["kind"]) == ("unavailable", "transport")
    assert len(house.servers[0].asked) == TRIES
    assert house.pauses == [BACKOFF_S, 2 * BACKOFF_S]


async def test_an_answer_that_cannot_be_trusted_is_not_asked_for_again():
    house = House("a", "b")
    house.servers[0].behave = lambda number: ContractViolation("other tokens")
    with pytest.raises(ContractViolation, match="other tokens"):
        await house.teacher.score(PROMPT, [sample(3)])
    assert sum(len(s.asked) for s in house.servers) == 1


async def test_no_more_calls_are_under_way_than_an_address_takes():
    house = House("a", concurrency=2)
    (server,) = house.servers
    found = await house.teacher.score(PROMPT, [sample(i) for i in range(1, 8)])
    assert (len(found), server.most) == (7, 2)


async def test_a_group_given_up_leaves_no_call_behind():
    house = House("a", concurrency=2)
    (server,) = house.servers
    server.go = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(house.teacher.score, PROMPT, [sample(i) for i in range(1, 5)])
        await anyio.wait_all_tasks_blocked()
        assert server.running == 2
        tasks.cancel_scope.cancel()
    assert server.running == 0
    server.go.set()
    assert len(await house.teacher.score(PROMPT, [sample(1)])) == 1, "all places were given back"


# In the producer


class Moody:
    """Fails the groups of one prompt the first time."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.scored: list[PromptId] = []

    async def score(self, prompt, samples):
        self.scored.append(prompt.id)
        if prompt.id.index == 1 and self.scored.count(prompt.id) == 1:
            raise self.error
        return [TeacherScores.of_sampled([-2.0] * len(s.token_ids)) for s in samples]


async def test_a_group_without_its_scores_goes_back_and_counts_as_unavailable(world_class):
    teacher = Moody(UnavailableError("three tries"))
    world = world_class(num_prompts=4, teacher=teacher)
    async with world.running():
        taken = await world.train(2)
    groups = {g.prompt.id.index: g for c in taken for g in c.groups}
    assert sorted(groups) == [0, 1, 2, 3]
    assert {i: g.attempt for i, g in groups.items()} == {0: 1, 1: 2, 2: 1, 3: 1}
    assert all(s.teacher is not None for g in groups.values() for s in g.samples)
    values = world.errors.values()
    assert values["errors/unavailable_groups"] == 1
    assert values["errors/completed_group_attempts"] == 5, "the failed one once, and not as good"
    assert len(world.rewards.judged) == 4, "nobody judged what had no scores"


class Asleep:
    """Does not answer the first question, and says that it was asked."""

    def __init__(self) -> None:
        self.scored: list[PromptId] = []

    async def score(self, prompt, samples):
        self.scored.append(prompt.id)
        if len(self.scored) == 1:
            await anyio.sleep_forever()
        return [TeacherScores.of_sampled([-2.0] * len(s.token_ids)) for s in samples]


async def test_a_deadline_that_passes_at_the_teacher_says_so(world_class):
    teacher = Asleep()
    world = world_class(
        num_prompts=2, teacher=teacher, waiting_deadline_s=10, running_deadline_s=20, hold_off_s=1
    )
    async with world.running():
        await world.time.run_for(29)
        assert world.errors.values()["errors/timeout_groups"] == 0
        await world.time.run_for(2)
        assert world.errors.values()["errors/timeout_groups"] == 1
        collection = await world.take(0)
    assert sorted(g.attempt for g in collection.groups) == [1, 2]
    (row,) = [row for row in world.rows if row["kind"] == "failure"]
    assert "waited for the teacher's scores after 30 s" in str(row)
    assert "'stage': 'teacher'" in str(row)


@pytest.mark.parametrize("with_teacher", [True, False])
async def test_a_deadline_that_passes_at_an_engine_says_so(
    world_class, outcome_class, with_teacher
):
    world = world_class(
        num_prompts=1,
        groups_per_collection=1,
        teacher=Asleep() if with_teacher else None,
        waiting_deadline_s=10,
        running_deadline_s=20,
    )
    world.behave = lambda request: outcome_class(seconds=1e6)
    async with world.running():
        await world.time.run_for(31)
    (row,) = [row for row in world.rows if row["kind"] == "failure"]
    assert "was not generated to its end after 30 s" in str(row)
    assert "'stage': 'generation'" in str(row)


async def test_scores_that_cannot_be_trusted_end_the_run(world_class):
    world = world_class(num_prompts=4, teacher=Moody(ContractViolation("other tokens")))
    with pytest.raises(ExceptionGroup) as raised:
        async with world.running():
            await world.train(2)
    assert raised.group_contains(ContractViolation, match="other tokens")
