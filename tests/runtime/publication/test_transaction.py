"""One transaction: whoever fails at whatever step is gone before anything resumes."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import (
    ContractViolation,
    DiskFull,
    EngineError,
    PublicationFailed,
    TrainerLost,
)
from runtime.policy import PolicyId
from runtime.publication.decision import read_decisions
from runtime.publication.protocol import Snapshot
from runtime.publication.verification import check_held
from tests.runtime.publication.tiny_engines import (
    KINDS,
)
from tests.runtime.publication.tiny_house import P1, P2, SHORT, House


def test_publishes_to_every_engine_and_says_so(house):
    async def main():
        home = house(3)
        decision = await home.publish(P1)
        assert [v.slot for v in decision.verified] == [0, 1, 2]
        assert decision.failed == ()
        assert decision.policy == "e1.u1"
        assert decision.previous is None
        assert decision.num_tensors == 3
        assert decision.num_bytes == 3 * 2 * 4 * 4
        assert all(home.serves(e, P1) for e in home.engines)
        assert read_decisions(home.record_path) == [decision]
        assert list(decision.stages_s) == [
            "prepare", "pause", "transfer", "verify", "set_policy", "resume",
        ]  # fmt: skip
        assert [(e.stage, e.edge) for e in home.edges][:3] == [
            ("prepare", "started"), ("prepare", "finished"), ("pause", "started"),
        ]  # fmt: skip
        await home.publisher.close()

    anyio.run(main)


CALLS = {
    "info": "prepare",
    "pause": "pause",
    "update_from_disk": "transfer",
    "checksums": "verify",
    "set_policy": "set_policy",
    "policy": "set_policy",
    "resume": "resume",
}
HARMLESS = {("info", "nothing"), ("set_policy", "nothing")}
"""Success without action changes nothing here: facts are facts, and loading set the policy."""
LATER = {("update_from_disk", "nothing"): "verify", ("update_from_disk", "torn"): "verify"}
"""Found one stage after the call that lied."""


def planned():
    # ``torn`` and ``nothing`` mean something for some calls only.
    return [
        (call, kind)
        for call in CALLS
        for kind in KINDS
        if not (kind == "torn" and call != "update_from_disk")
        and not (kind == "nothing" and call in ("pause", "resume"))
    ]


@pytest.mark.parametrize(("call", "kind"), planned())
def test_one_engine_failing_at_one_step_is_killed_before_anything_resumes(house, call, kind):
    async def main():
        home = house(2, limits=SHORT if kind == "hang" else None)
        await home.publish(P1)
        home.faults.plan[1, call] = kind
        home.publisher._parts.infos.clear()
        decision = await home.publish(P2)
        assert home.faults.fired[1, call, kind] == 1
        assert home.publisher.published == P2
        assert not home.publisher.is_halted
        assert home.serves(home.engines[0], P2)
        if (call, kind) in HARMLESS:
            assert [v.slot for v in decision.verified] == [0, 1]
            return
        assert [v.slot for v in decision.verified] == [0]
        (failed,) = decision.failed
        assert (failed.slot, failed.incarnation, failed.killed) == (1, "i1", True)
        assert failed.stage == LATER.get((call, kind), CALLS[call])
        assert home.engines[1].is_dead
        events = home.journal.events[home.journal.events.index(("resume", 1)) + 1 :]
        assert events.count(("kill", 1)) == 1
        if call != "resume":
            assert events.index(("kill", 1)) < events.index(("resume", 0))
            assert ("resume", 1) not in events

    anyio.run(main)


def test_nothing_resumes_when_no_engine_is_verified_and_the_retry_works(house):
    async def main():
        home = house(2)
        await home.publish(P1)
        for slot in (0, 1):
            home.faults.plan[slot, "update_from_disk"] = "torn"
        home.journal.events.clear()
        with pytest.raises(PublicationFailed, match=r"no engine was verified at e1\.u2") as caught:
            await home.publish(P2)
        assert [f["slot"] for f in caught.value.detail["failed"]] == [0, 1]
        assert home.publisher.published == P1
        assert home.publisher.is_halted
        assert home.journal.of("resume") == []
        assert home.journal.of("kill") == []
        assert all(e.paused for e in home.engines)
        home.faults.plan.clear()
        decision = await home.publish(P2)
        assert all(home.serves(e, P2) for e in home.engines)
        assert decision.previous == "e1.u1"
        outcomes = [d.outcome for d in read_decisions(home.record_path)]
        assert outcomes == ["published", "failed", "published"]

    anyio.run(main)


def test_an_engine_that_cannot_be_ended_keeps_all_others_paused(house):
    async def main():
        home = house(2)
        home.faults.plan[1, "checksums"] = "refuse"
        home.kill_error = RuntimeError("actor is stuck")
        with pytest.raises(PublicationFailed, match="could not end engine 1"):
            await home.publish(P1)
        assert home.journal.of("resume") == []
        assert home.publisher.published is None
        home.kill_error = None
        home.faults.plan.clear()
        await home.publish(P1)
        assert all(home.serves(e, P1) for e in home.engines)

    anyio.run(main)


def test_an_engine_that_neither_resumes_nor_dies_undoes_no_decision(house):
    async def main():
        home = house(2)
        await home.publish(P1)
        home.faults.plan[1, "resume"] = "refuse"
        home.kill_error = RuntimeError("actor is stuck")
        decision = await home.publish(P2)
        assert home.publisher.published == P2
        assert not home.publisher.is_halted
        assert home.serves(home.engines[0], P2)
        assert [v.slot for v in decision.verified] == [0]
        (failed,) = decision.failed
        assert (failed.slot, failed.stage, failed.killed) == (1, "resume", False)
        assert [d.outcome for d in read_decisions(home.record_path)] == ["published"] * 2

    anyio.run(main)


@pytest.mark.parametrize("error", [DiskFull("no space"), TrainerLost("rank 0 is gone")])
def test_trouble_on_the_trainers_side_before_the_pause_touches_no_engine(house, error):
    async def main():
        home = house(2)
        await home.publish(P1)
        right = home.trainer.write_snapshot

        async def broken(folder: str, kinds):
            raise error

        home.trainer.write_snapshot = broken
        home.journal.events.clear()
        with pytest.raises(type(error)):
            await home.publish(P2)
        assert home.journal.events == []
        assert not home.publisher.is_halted
        home.trainer.write_snapshot = right
        await home.publish(P2)
        assert all(home.serves(e, P2) for e in home.engines)

    anyio.run(main)


def test_a_snapshot_without_weights_is_refused(house):
    async def main():
        home = house(1)
        home.trainer.num_tensors = 0
        with pytest.raises(ContractViolation):
            await home.publish(P1)
        assert home.journal.events == []

    anyio.run(main)


def test_no_engine_at_all_is_a_failed_publication(house):
    async def main():
        home = house(0)
        with pytest.raises(PublicationFailed, match="there is no engine"):
            await home.publish(P1)

    anyio.run(main)


def test_cancelled_publication_leaves_engines_paused_and_a_record(house):
    async def main():
        home = house(2)
        home.faults.plan[1, "checksums"] = "hang"
        with anyio.move_on_after(0.05) as scope:
            await home.publish(P1)
        assert scope.cancelled_caught
        assert home.journal.of("resume") == []
        assert home.publisher.is_halted
        (record,) = read_decisions(home.record_path)
        assert record.outcome == "abandoned"
        home.faults.plan.clear()
        await home.publish(P1)
        assert all(home.serves(e, P1) for e in home.engines)

    anyio.run(main)


held = st.dictionaries(st.sampled_from("abcde"), st.sampled_from(["1", "2"]))


@given(left=held.filter(bool), on_engine=held)
def test_only_the_very_same_tensors_are_verified(left, on_engine):
    snapshot = Snapshot(
        policy=P1, num_tensors=len(left), num_bytes=1, digests={"sha256": left}, path=None
    )
    if left == on_engine:
        check_held(snapshot, on_engine)
    else:
        with pytest.raises(EngineError, match=f"of {len(left)} tensors"):
            check_held(snapshot, on_engine)


def test_an_unwritable_record_does_not_undo_a_publication(house):
    async def main():
        home = house(1)
        home.record_path.mkdir()
        decision = await home.publish(P1)
        assert decision.outcome == "published"
        assert home.serves(home.engines[0], P1)

    anyio.run(main)


faults_of_a_round = st.dictionaries(
    st.tuples(st.integers(0, 3), st.sampled_from(sorted(CALLS))),
    st.sampled_from(["refuse", "lose", "bug"]),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(num_engines=st.integers(1, 4), rounds=st.lists(faults_of_a_round, min_size=1, max_size=5))
def test_any_failures_leave_only_verified_engines_serving(tmp_path_factory, num_engines, rounds):
    """Against a small model: who has no fault before ``resume`` is verified, the rest is gone."""

    async def main():
        home = House(tmp_path_factory.mktemp("p"), num_engines)
        alive, published = set(range(num_engines)), None
        for update, plan in enumerate(rounds, start=1):
            policy = PolicyId(1, update)
            home.faults.plan = dict(plan)
            home.publisher._parts.infos.clear()
            bad = {slot for (slot, call) in plan if call != "resume"} & alive
            stuck = {slot for (slot, call) in plan if call == "resume"} & alive
            before = len(home.journal.events)
            good = alive - bad
            if good:
                decision = await home.publish(policy)
                published = policy
                assert {v.slot for v in decision.verified} == good - stuck
                assert {f.slot for f in decision.failed} == bad | stuck
                events = home.journal.events[before:]
                resumed = [i for i, (what, _) in enumerate(events) if what == "resume"]
                killed = [i for i, (what, s) in enumerate(events) if what == "kill" and s in bad]
                assert not resumed or not killed or max(killed) < min(resumed)
                alive = good - stuck
            else:
                with pytest.raises(PublicationFailed):
                    await home.publish(policy)
                assert all(
                    what not in ("resume", "kill") for what, _ in home.journal.events[before:]
                )
            assert home.publisher.published == published
            assert {e.slot for e in home.live} == alive
            if good:
                assert all(home.serves(e, policy) for e in home.live)
        await home.publisher.close()

    anyio.run(main)
