import asyncio
from contextlib import suppress
from dataclasses import replace

import anyio
import pytest
from structlog.testing import capture_logs

from runtime.data.samples import PromptId
from runtime.errors import (
    ConfigError,
    ContractViolation,
    DataBudgetExceeded,
    FilterStarved,
    OverloadError,
    ServingStopped,
    SessionError,
    TransportError,
    VerifierCrashed,
    WaitTimeout,
)
from runtime.rollout.filters import equal_rewards
from runtime.rollout.functions import SingleTurn

pytestmark = pytest.mark.anyio


def indices(collection):
    return [group.prompt.id.index for group in collection.groups]


def prompt_index(request):
    """From the request id; the simulated prompts all have the same tokens."""
    return int(request.rid.split("-")[1].split(":")[1])


def attempt(request):
    return int(request.rid.split("-")[2])


# --- Collections, bounds, room ------------------------------------------------------------------


async def test_collections_come_in_order_of_prompts_until_the_data_ends(world_class):
    world = world_class(num_prompts=7)
    async with world.running():
        taken = await world.train(10)
    assert [indices(c) for c in taken] == [[0, 1], [2, 3], [4, 5], [6]]
    assert [c.id for c in taken] == [1, 2, 3, 4]
    counts = world.ledger.counts()
    assert (counts.consumed, counts.pending, counts.remaining) == (7, 0, 0)


async def test_uniform_sampling_sends_a_group_as_one_request_with_its_policy_as_salt(world_class):
    world = world_class()
    async with world.running(update=5):
        await world.take(5)
    first = world.engines[0].requests[0]
    assert (first.n, first.salt, first.input_ids) == (2, "e3.u5", (1, 2, 3))
    rids = [request.rid for request in world.engines[0].requests]
    assert len(set(rids)) == len(rids)


async def test_whole_groups_go_out_when_enough_sample_slots_are_free(world_class, outcome_class):
    world = world_class(samples_per_prompt=3, max_concurrent_samples=8)
    async with world.running():
        await world.time.run_for(0.1)
        assert world.producer.occupancy()["samples_in_flight"] == 6, "two slots hold no whole group"
        await world.train(3)
    assert world.engines[0].max_running_samples == 6


def test_a_bound_below_one_group_is_refused(world_class):
    with pytest.raises(ConfigError, match="no whole group of 4"):
        world_class(samples_per_prompt=4, max_concurrent_samples=3)


async def test_room_is_made_by_publication_not_by_consumption(world_class):
    world = world_class(max_staleness=1, updates_per_collection=1)
    bound = 2 * (1 + 1)
    async with world.running() as producer:
        collection = await world.take(0)
        await world.time.run_for(20)
        assert world.ledger.counts().pending == bound
        world.consume(collection, 1)
        await world.time.run_for(20)
        assert producer.occupancy()["groups_outstanding"] == bound
        assert world.ledger.counts().pending == bound - 2, "consumed, and nothing admitted for it"
        world.publish(1)
        await world.time.run_for(1)
        assert world.ledger.counts().pending == bound


@pytest.mark.parametrize(
    ("max_staleness", "updates_per_collection", "collections"),
    [(0, 1, 1), (1, 1, 2), (4, 1, 5), (4, 2, 3), (5, 2, 3), (1, 2, 1)],
)
async def test_groups_ahead_follow_from_staleness_and_updates_per_collection(
    world_class, max_staleness, updates_per_collection, collections
):
    world = world_class(
        max_staleness=max_staleness,
        updates_per_collection=updates_per_collection,
        buffer_collections=10,
    )
    async with world.running():
        await world.time.run_for(30)
    assert world.ledger.counts().pending == 2 * collections


async def test_a_full_buffer_holds_admission_back_and_drops_nothing(world_class):
    world = world_class(max_staleness=8, buffer_collections=1, max_concurrent_samples=6)
    async with world.running() as producer:
        await world.time.run_for(30)
        row = producer.occupancy()
        assert (row["groups_buffered"], row["groups_in_flight"]) == (2, 0)
        waiting = row["groups_waiting_for_room"]
        assert 1 <= waiting <= 2 + 3, "no more than finish while they are in flight"
        assert world.ledger.counts().pending == 2 + waiting
        taken = await world.train(4)
    assert [indices(c) for c in taken] == [[0, 1], [2, 3], [4, 5], [6, 7]]


async def test_the_last_collection_may_be_short_and_a_filter_may_empty_it(world_class):
    world = world_class(num_prompts=3, accept=equal_rewards)
    world.rewards.rule = lambda prompt: [1.0, 1.0] if prompt.id.index == 2 else [0.0, 1.0]
    async with world.running():
        taken = await world.train(5)
    assert [indices(c) for c in taken] == [[0, 1]]
    counts = world.ledger.counts()
    assert (counts.consumed, counts.filtered, counts.pending) == (2, 1, 0)


async def test_asking_a_producer_that_does_not_run_is_an_error(world_class):
    world = world_class()
    with pytest.raises(SessionError):
        await world.producer.take(2, world.policy(0))
    async with world.running():
        pass
    with pytest.raises(SessionError):
        await world.producer.take(2, world.policy(0))


async def test_nothing_is_admitted_before_a_policy_is_published(world_class):
    world = world_class()
    async with anyio.create_task_group() as tasks:
        await tasks.start(world.producer.run)
        await world.time.run_for(10)
        assert world.ledger.counts().pending == 0
        await world.producer.close()


async def test_a_publication_of_another_epoch_or_of_the_past_is_refused(world_class):
    world = world_class()
    async with world.running(update=3) as producer:
        with pytest.raises(ContractViolation):
            producer.published(world.policy(2))
        with pytest.raises(ContractViolation):
            producer.published(type(world.policy(0))(world.epoch + 1, 9))


async def test_consuming_what_was_never_taken_is_a_violation(world_class):
    world = world_class()
    async with world.running() as producer:
        collection = await world.take(0)
        world.consume(collection, 1)
        with pytest.raises(ContractViolation):
            producer.consumed(collection.groups)


async def test_a_wait_without_progress_warns_and_then_says_what_it_waited_for(
    world_class, outcome_class
):
    world = world_class()
    world.behave = lambda request: outcome_class(seconds=1e6)
    warnings = []
    async with world.running() as producer:
        with pytest.raises(ExceptionGroup) as raised:
            await world.while_time_passes(
                lambda: producer.take(
                    2, world.policy(0), no_progress_s=100, on_wait=warnings.append
                )
            )
    assert raised.group_contains(WaitTimeout, match="0 finished, 10 in flight")
    assert [round(w.waited_s) for w in warnings] == [30, 60, 90]


# --- Staleness ----------------------------------------------------------------------------------


async def test_a_group_that_grew_too_old_starts_again_and_is_then_waited_for(
    world_class, outcome_class
):
    world = world_class(max_staleness=1)
    slow = 0

    def behave(request):
        return outcome_class(seconds=5.0 if prompt_index(request) == slow else 0.5)

    world.behave = behave
    async with world.running():
        first = await world.take(0)
        assert slow not in indices(first)
        world.consume(first, 1)
        world.publish(1)
        await world.time.run_for(1)
        second = await world.take(1)
        assert slow not in indices(second), "begun at 0, it would be 2 updates old at the next take"
        await world.time.run_for(0)
        counts = world.ledger.counts()
        assert counts.requeued == 1
        world.consume(second, 2)
        world.publish(2)
        third = await world.take(2)
        assert slow in indices(third), "the second time the trainer waits"
        (group,) = [g for g in third.groups if g.prompt.id.index == slow]
        assert (group.attempt, group.oldest.update) == (2, 1)
    assert world.errors.values()["errors/completed_group_attempts"] == len(world.rewards.judged)
    assert world.errors.values()["errors/window_failed_groups"] == 0


async def test_finished_groups_that_nobody_took_in_time_are_generated_anew(world_class):
    world = world_class(max_staleness=0)
    async with world.running():
        await world.time.run_for(5)
        world.publish(1)  # an update that consumed nothing: what is buffered is too old for it
        collection = await world.take(1)
    assert indices(collection) == [0, 1]
    assert {g.attempt for g in collection.groups} == {2}
    assert {g.oldest.update for g in collection.groups} == {1}


# --- Serving errors -----------------------------------------------------------------------------


async def test_a_serving_error_sends_the_pristine_prompt_back_and_holds_admission_off(
    world_class, outcome_class
):
    world = world_class(num_prompts=4, max_concurrent_samples=4)
    failed = []

    def behave(request):
        if prompt_index(request) == 1 and not failed:
            failed.append(world.time.monotonic())
            return outcome_class(seconds=0.3, error=TransportError("reset"))
        return outcome_class(seconds=0.5)

    world.behave = behave
    async with world.running():
        await world.time.run_for(0.4)
        assert world.producer.occupancy()["groups_in_flight"] == 1
        await world.time.run_for(0.85)
        assert len(world.engines[0].requests) == 2, "nothing new within a second of the failure"
        taken = await world.train(2)
    assert sorted(i for c in taken for i in indices(c)) == [0, 1, 2, 3]
    again = world.engines[0].requests[2]
    assert (prompt_index(again), attempt(again)) == (1, 2)
    assert world.ledger.counts().requeued == 1


async def test_siblings_are_cancelled_and_joined_and_all_of_the_attempt_is_thrown_away(
    world_class, outcome_class
):
    world = world_class(num_prompts=1, groups_per_collection=1, samples_per_prompt=3, seed=7)
    outcomes = {1: [0.1, 0.2, 50.0], 2: [0.1, 0.1, 0.1]}

    def behave(request):
        seconds = outcomes[attempt(request)].pop(0)
        is_lost = attempt(request) == 1 and seconds == 0.2
        return outcome_class(seconds=seconds, error=OverloadError("full") if is_lost else None)

    world.behave = behave
    with capture_logs() as rows:
        async with world.running():
            await world.time.run_for(0.3)
            assert not world.engines[0].running, "the third request was cancelled and is gone"
            assert world.engines[0].requests[0].n == 1
            collection = await world.take(0)
    assert "group.unjoined" not in {row["event"] for row in rows}
    (group,) = collection.groups
    assert (group.attempt, len(group.samples)) == (2, 3)
    assert len({r.sampling.seed for r in world.engines[0].requests}) == 3, "one seed per sample"


class LeavesOneBehind:
    """A rollout function with the defect its contract names: it does not join what it began."""

    def __init__(self, decode):
        self.decode = decode
        self.left = []

    async def __call__(self, task, generate):
        async def alone():
            with suppress(asyncio.CancelledError):
                await generate(task.prompt.token_ids, task.sampling)

        self.left.append(asyncio.ensure_future(alone()))
        return await SingleTurn(decode=self.decode)(task, generate)


async def test_an_attempt_that_is_settled_with_a_request_still_out_is_told(
    world_class, outcome_class
):
    world = world_class(num_prompts=1, groups_per_collection=1)
    function = LeavesOneBehind(str)
    world.producer._parts = replace(world.producer._parts, function=function)
    world.behave = lambda request: outcome_class(seconds=9.0 if request.n == 1 else 0.5)
    with capture_logs() as rows:
        async with world.running():
            await world.take(0)
            assert [r.n for r in world.engines[0].requests] == [2, 1]
            await world.time.run_for(20.0)
            await asyncio.gather(*function.left)
    told = [row for row in rows if row["event"] == "group.unjoined"]
    assert [(row["attempt"], row["requests"]) for row in told] == [(1, 1)]


async def test_the_stop_rule_ends_the_run_and_the_wait_of_the_trainer(world_class, outcome_class):
    world = world_class()
    world.behave = lambda request: outcome_class(seconds=0.1, error=OverloadError("queue full"))
    with pytest.raises(ExceptionGroup) as raised:
        async with world.running():
            await world.take(0)
    assert raised.group_contains(ServingStopped, match="of the last 5 minutes failed")
    assert 300 <= world.time.monotonic() - 1000 < 310
    assert world.rows[-1]["kind"] == "summary"
    assert world.rows[-1]["error"] == "ServingStopped"
    assert world.series[-1]["errors/fatal"] == 1


async def test_without_an_engine_one_attempt_a_second_fails_as_unavailable(world_class):
    world = world_class()
    async with world.running():
        world.pool.mark_dead(0, "a", "gone")
        await world.time.run_for(10)
        unavailable = world.errors.values()["errors/unavailable_groups"]
        assert 5 <= unavailable <= 11
        world.join(0, "b")
        world.publish(1)
        assert await world.take(1) is not None


async def test_requests_of_a_dead_engine_are_given_up_at_once_and_its_groups_requeued(
    world_class, outcome_class
):
    world = world_class(engines=2, max_concurrent_samples=8)
    world.behave = lambda request: outcome_class(seconds=1e6)
    async with world.running() as producer:
        await world.time.run_for(1)
        assert [len(e.requests) for e in world.engines] == [2, 2], "least loaded first"
        world.pool.mark_dead(1, "a", "three probes missed")
        await world.time.run_for(0)
        assert not world.engines[1].running
        assert world.errors.values()["errors/transport_groups"] == 2
        assert producer.occupancy()["groups_in_flight"] == 2, "the others go on"
        await world.time.run_for(2)
        assert [len(e.running) for e in world.engines] == [4, 0]


@pytest.mark.parametrize("error", [ContractViolation("spans"), RuntimeError("unknown")])
async def test_anything_else_is_fatal_and_nothing_is_lost(world_class, outcome_class, error):
    world = world_class()
    world.behave = lambda request: outcome_class(
        seconds=1.0, error=error if prompt_index(request) == 3 else None
    )
    with pytest.raises(ExceptionGroup) as raised:
        async with world.running():
            await world.train(10)
    assert raised.group_contains(type(error))
    world.ledger.check()
    assert world.ledger.counts().in_flight == 0


async def test_samples_outside_the_vocabulary_are_a_contract_violation(world_class):
    world = world_class(vocab_size=1)
    with pytest.raises(ExceptionGroup) as raised:
        async with world.running():
            await world.take(0)
    assert raised.group_contains(ContractViolation, match="in \\[0, 1\\)")


async def test_weights_older_than_the_verified_policy_are_a_contract_violation(world_class):
    world = world_class()

    async def serve_old_weights():
        async with world.running(update=4):
            world.engines[0].held = world.policy(3)
            await world.train(5, start=4)

    with pytest.raises(ExceptionGroup) as raised:
        await serve_old_weights()
    assert raised.group_contains(ContractViolation, match="older than e3.u4")


# --- Deadlines ----------------------------------------------------------------------------------


async def test_a_group_past_its_deadline_is_a_timeout_of_the_group(world_class, outcome_class):
    world = world_class(num_prompts=2, waiting_deadline_s=10, running_deadline_s=20, hold_off_s=1)
    world.behave = lambda request: outcome_class(
        seconds=1e6 if prompt_index(request) == 0 and attempt(request) == 1 else 1.0
    )
    async with world.running():
        await world.time.run_for(29)
        assert world.errors.values()["errors/timeout_groups"] == 0
        await world.time.run_for(2)
        assert world.errors.values()["errors/timeout_groups"] == 1
        assert indices(await world.take(0)) == [0, 1]


async def test_deadlines_run_only_while_the_gate_is_open(world_class, outcome_class):
    world = world_class(num_prompts=2, waiting_deadline_s=10, running_deadline_s=20)
    world.behave = lambda request: outcome_class(seconds=200.0)
    async with world.running():
        await world.time.run_for(5)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(shut_for_evaluation, world.gate)
            await world.time.run_for(100)
            assert not world.gate.is_open
            assert world.errors.values()["errors/timeout_groups"] == 0
            tasks.cancel_scope.cancel()
        world.gate.open()
        await world.time.run_for(24)
        assert world.errors.values()["errors/timeout_groups"] == 0
        await world.time.run_for(2)
        assert world.errors.values()["errors/timeout_groups"] == 2


async def shut_for_evaluation(gate):
    await gate.close(drain_deadline_s=1e9, reason="evaluation")


# --- Filters and data failures ------------------------------------------------------------------


async def test_a_filter_that_lets_nothing_through_ends_with_its_statistics(world_class):
    world = world_class(accept=equal_rewards, filter_max_rounds=3)
    world.rewards.rule = lambda prompt: [0.25, 0.25]
    with pytest.raises(ExceptionGroup) as raised:
        async with world.running():
            await world.take(0)
    assert raised.group_contains(FilterStarved, match=r"rejected 7 of 7 .*mean reward 0.25")
    assert world.ledger.counts().filtered == 6, "the seventh is pending: nothing was decided on it"


async def test_rejections_are_counted_for_each_collection_anew(world_class):
    world = world_class(accept=equal_rewards, filter_max_rounds=2, num_prompts=40)
    world.rewards.rule = lambda prompt: [0.0, 0.0] if prompt.id.index % 2 else [0.0, 1.0]
    async with world.running():
        taken = await world.train(10)
    assert len(taken) == 10
    counts = world.ledger.counts()
    assert (counts.consumed, counts.filtered) == (20, 20)
    values = world.errors.values()
    assert values["errors/completed_group_attempts"] == 40, "successes count before filters"
    assert values["errors/window_failed_groups"] == 0


async def test_a_data_failure_within_the_budget_skips_the_prompt_and_is_no_serving_error(
    world_class,
):
    world = world_class(num_prompts=4, budget=1)
    world.rewards.rule = lambda prompt: VerifierCrashed("boom") if prompt.id.index == 1 else []
    async with world.running():
        taken = await world.train(4)
    assert [indices(c) for c in taken] == [[0, 2], [3]]
    counts = world.ledger.counts()
    assert (counts.skipped, counts.consumed, counts.requeued) == (1, 3, 0)
    assert world.errors.values()["errors/window_failed_groups"] == 0
    assert world.budget.charged == [PromptId(0, 1)]


async def test_a_data_failure_past_the_budget_ends_the_run(world_class):
    world = world_class(budget=0)
    world.rewards.rule = lambda prompt: VerifierCrashed("boom")
    with pytest.raises(ExceptionGroup) as raised:
        async with world.running():
            await world.take(0)
    assert raised.group_contains(DataBudgetExceeded)
    world.ledger.check()
    assert world.ledger.counts().skipped == 0


async def test_rewards_that_are_no_numbers_are_a_contract_violation(world_class):
    world = world_class()
    world.rewards.rule = lambda prompt: [float("nan"), 1.0]
    with pytest.raises(ExceptionGroup) as raised:
        async with world.running():
            await world.take(0)
    assert raised.group_contains(ContractViolation, match="judged as")


# --- Gate ---------------------------------------------------------------------------------------


async def test_shared_evaluation_drains_calls_but_not_rewards_and_nothing_is_resampled(world_class):
    world = world_class(max_staleness=1)
    async with world.running():
        await world.time.run_for(0.5)
        async with anyio.create_task_group() as tasks:
            opened = anyio.Event()
            tasks.start_soon(evaluate_until, world, opened)
            await world.time.run_for(5)
            row = world.producer.occupancy()
            assert row["generation_admission_paused"] == 1
            assert row["generation_active_calls"] == 0
            assert row["groups_buffered"] == 2, "finished meanwhile"
            before = len(world.engines[0].requests)
            await world.time.run_for(60)
            assert len(world.engines[0].requests) == before
            opened.set()
        taken = await world.train(3)
        assert world.ledger.counts().requeued == 0
    assert [indices(c) for c in taken] == [[0, 1], [2, 3], [4, 5]]


async def evaluate_until(world, event):
    async with world.gate.evaluation(drain_deadline_s=10, max_calls=4):
        await event.wait()


async def test_stragglers_of_a_drain_are_requeued_and_are_no_failures(world_class, outcome_class):
    world = world_class(max_staleness=0)
    world.behave = lambda request: outcome_class(
        seconds=1e6 if prompt_index(request) == 0 and attempt(request) == 1 else 1.0
    )
    async with world.running():
        await world.time.run_for(2)
        async with anyio.create_task_group() as tasks:
            opened = anyio.Event()
            tasks.start_soon(evaluate_until, world, opened)
            await world.time.run_for(9.9)
            assert len(world.engines[0].running) == 1
            await world.time.run_for(0.2)
            assert not world.engines[0].running
            await world.time.run_for(5)
            assert attempt(world.engines[0].requests[-1]) == 1, "not asked again while it is shut"
            opened.set()
        assert indices(await world.take(0)) == [0, 1]
    values = world.errors.values()
    assert (values["errors/requeued_groups"], values["errors/window_failed_groups"]) == (1, 0)


# --- Abort and continue -------------------------------------------------------------------------


async def test_a_response_aborted_by_a_publication_goes_on_at_the_new_policy(
    world_class, outcome_class
):
    world = world_class(num_prompts=2, max_concurrent_samples=4)
    world.behave = lambda request: outcome_class(seconds=10.0)
    async with world.running() as producer:
        await world.time.run_for(1)
        world.engines[0].abort_all()
        await world.time.run_for(1)
        assert len(world.engines[0].requests) == 2, "nothing goes on before the publication"
        assert producer.occupancy()["samples_in_flight"] == 4, "the permits are kept"
        world.publish(1)
        collection = await world.take(1)
    continued = world.engines[0].requests[2:]
    assert [r.n for r in continued] == [1, 1, 1, 1]
    assert {r.input_ids for r in continued} == {(1, 2, 3, 0)}, "prompt and partial response"
    assert {r.sampling.max_new_tokens for r in continued} == {7}
    assert {r.salt for r in continued} == {"e3.u1"}
    for group in collection.groups:
        assert group.attempt == 1
        for sample in group.samples:
            assert [(s.start, s.end, s.policy.update) for s in sample.spans] == [
                (0, 1, 0), (1, 3, 1),
            ]  # fmt: skip
            assert sample.prefill.update == 0
    assert world.ledger.counts().requeued == 0


# --- Ends ---------------------------------------------------------------------------------------


async def test_closing_cancels_joins_and_requeues_what_is_in_flight(world_class, outcome_class):
    world = world_class()
    world.behave = lambda request: outcome_class(seconds=1e6)
    async with world.running():
        await world.time.run_for(1)
        assert world.ledger.counts().in_flight == 10
    counts = world.ledger.counts()
    assert (counts.in_flight, counts.queued, counts.pending) == (0, 10, 10)
    assert not world.engines[0].running
    assert world.errors.values()["errors/fatal"] == 0
    assert world.rows[-1]["kind"] == "summary"


async def test_cancellation_from_outside_is_a_clean_stop(world_class):
    world = world_class()
    async with anyio.create_task_group() as tasks:
        await tasks.start(world.producer.run)
        world.publish(0)
        await world.time.run_for(0.5)
        tasks.cancel_scope.cancel()
    assert world.errors.values()["errors/fatal"] == 0
    world.ledger.check()
    assert world.ledger.counts().in_flight == 0


async def test_a_cancellation_that_leaks_out_of_a_library_is_fatal_not_silent(
    world_class, outcome_class
):
    world = world_class()

    leak = anyio.get_cancelled_exc_class()
    world.behave = lambda request: outcome_class(
        seconds=0.1, error=leak() if prompt_index(request) == 2 else None
    )
    with pytest.raises(ExceptionGroup) as raised:
        async with world.running():
            await world.train(5)
    assert raised.group_contains(SessionError, match="cancelled by nobody")
    assert world.ledger.counts().in_flight == 0


async def test_a_defect_in_the_prompt_source_is_fatal(world_class, monkeypatch):
    world = world_class()

    def broken(index):
        raise KeyError(index)

    parts = replace(world.producer._parts, prompt=broken)
    monkeypatch.setattr(world.producer, "_parts", parts)
    with pytest.raises(ExceptionGroup) as raised:
        async with world.running():
            await world.take(0)
    assert raised.group_contains(KeyError)


# --- Records ------------------------------------------------------------------------------------


async def test_error_series_come_every_fifteen_seconds_and_at_the_end(world_class):
    world = world_class()
    async with world.running():
        await world.time.run_for(46)
        assert len(world.series) == 3
    assert len(world.series) == 4
    assert [round(row["errors/elapsed_seconds"]) for row in world.series] == [15, 30, 45, 46]
    assert set(world.series[0]) == {
        f"errors/{name}"
        for name in (
            "elapsed_seconds", "transport_groups", "overload_groups", "unavailable_groups",
            "timeout_groups", "completed_group_attempts", "requeued_groups",
            "window_group_attempts", "window_failed_groups", "failure_fraction_5m",
            "high_failure_seconds", "fatal",
        )
    }  # fmt: skip


async def test_occupancy_names_gate_calls_groups_engines_and_errors(world_class):
    world = world_class(engines=2)
    async with world.running() as producer:
        await world.time.run_for(0.5)
        row = producer.occupancy()
    assert row["policy"] == "e3.u0"
    assert row["http_active_calls"] == row["generation_active_calls"] == 10
    assert row["samples_in_flight"] == 20
    assert row["groups_outstanding"] == row["max_outstanding_groups"] == 10
    assert row["engine/0/active_samples"] == row["engine/1/active_samples"] == 10
    assert row["engine/1/state"] == "healthy"
    assert row["errors/fatal"] == 0


async def test_length_shaping_adds_to_the_verdict(world_class, monkeypatch):
    world = world_class()
    parts = replace(world.producer._parts, shape=lambda sample: -0.25 * len(sample.token_ids))
    monkeypatch.setattr(world.producer, "_parts", parts)
    async with world.running():
        collection = await world.take(0)
    assert [group.rewards for group in collection.groups] == [(-0.5, 0.5)] * 2


async def test_a_recording_failure_stops_nothing(world_class, monkeypatch):
    world = world_class(num_prompts=4)

    def broken(values):
        raise OSError("disk full")

    monkeypatch.setattr(world.errors, "_series", broken)
    monkeypatch.setattr(world.errors, "_row", broken)
    async with world.running():
        await world.time.run_for(20)
        assert len(await world.train(5)) == 2


async def test_failure_rows_bound_what_a_server_said(world_class, outcome_class):
    world = world_class(num_prompts=2)
    page = "<html>" + "x" * 10_000
    world.behave = lambda request: outcome_class(
        error=OverloadError(page, body=page) if attempt(request) == 1 else None
    )
    async with world.running():
        await world.train(2)
    rows = [row for row in world.rows if row["kind"] == "failure"]
    assert len(rows) == 2
    assert all(len(row["message"]) < 600 and len(row["detail"]["body"]) < 600 for row in rows)
