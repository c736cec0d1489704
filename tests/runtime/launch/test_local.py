"""Who launches, who attaches, who is refused; and one real guard from start to end."""

import json
import os
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import ConfigError
from runtime.launch import attempts
from runtime.launch.attempts import Launch, differences, spec_digest
from runtime.launch.local import LocalLaunch
from runtime.policy import PolicyId
from runtime.rundir import enter, history
from runtime.rundir.attempt import AttemptFile, Started, TurnedAway
from runtime.rundir.chain import Chain
from runtime.rundir.claims import (
    STARTED_WITHIN_S,
    claim_attempt,
    make_claim,
    pending_of,
    read_claim,
)
from runtime.rundir.layout import RunRoot
from runtime.rundir.processes import HostBoot, kill_exactly
from runtime.rundir.records import CommitRecord, EndRecord, EpochRecord
from runtime.session.answers import Done, Ended, Lost, Running
from runtime.session.ensure import ensure

SPEC = json.dumps({"core": {"lr": 1e-3, "max_updates": 10}, "name": "t"})
OTHER = json.dumps({"core": {"lr": 2e-3, "max_updates": 10}, "name": "t"})
LONGER = json.dumps({"core": {"lr": 1e-3, "max_updates": 20}, "name": "t"})

GONE = (sys.executable, "-c", "pass")
LIVE = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture
def root(tmp_path: Path) -> RunRoot:
    return RunRoot.of(tmp_path / "run")


def own(root: RunRoot, attempt: int, **changes: object) -> Chain:
    """Append the epoch of an attempt whose guard is this process."""
    chain = Chain(root)
    records = chain.read()
    here = HostBoot.here()
    before = history.newest_epoch(records)
    restored = history.newest_commit(records)
    record = EpochRecord(
        epoch=before.epoch + 1 if before else 1,
        time=0.0,
        attempt=attempt,
        host=here.host,
        pid=os.getpid(),
        boot_id=here.boot_id,
        started=enter.started(os.getpid()),
        reason="test",
        restored=restored.policy if restored else None,
        restored_seq=restored.seq if restored else None,
        lease_s=None if records else 30.0,
    )
    chain.append(record.model_copy(update=changes))
    return chain


def commit(chain: Chain, digest: str) -> None:
    chain.append(
        CommitRecord(
            epoch=1,
            time=0.0,
            format_version=1,
            update=5,
            policy=str(PolicyId(1, 5)),
            training_digest=digest,
            layout={},
            data_fingerprint="d",
            ledger_checksum="l",
            consumed_digest="c",
            folder="f",
            files=(),
        )
    )


def end(chain: Chain, state: str) -> None:
    activity = "stopped" if state == "training" else None
    chain.append(
        EndRecord(epoch=1, time=0.0, state=state, activity=activity, ended_by="test", update=5)
    )


def start(root: RunRoot, spec: str = SPEC, digest: str = "t", guard=GONE, **more: object):
    return LocalLaunch(guard=guard).start(root, spec, digest, run="t", **more)


@contextmanager
def ended(root: RunRoot, attempt: int) -> Generator[None]:
    """End the living guard of an attempt, whatever happens to the test."""
    try:
        yield
    finally:
        guard = Started.decode(root.attempt(attempt).started.read_bytes(), "started")
        assert kill_exactly(guard.pid, guard.started)


def collected(root: RunRoot, attempt: int) -> None:
    """Wait until the guard of an attempt, a dummy that does nothing, is gone."""
    until = time.monotonic() + 10
    fields = json.loads(root.attempt(attempt).started.read_text())
    while enter.started(fields["pid"]) is not None:
        assert time.monotonic() < until
        time.sleep(0.005)


def test_of_two_launchers_one_wins_and_the_other_attaches(root: RunRoot) -> None:
    for n in range(8):
        at = RunRoot.of(root.path / str(n))
        launches: list[tuple[str, int]] = []
        barrier = threading.Barrier(4)

        def launch(at: RunRoot = at, barrier=barrier, launches=launches) -> None:
            barrier.wait()
            # A guard that is gone before the last of them looks would be succeeded.
            found = start(at, guard=LIVE)
            launches.append((found.how, found.attempt))

        threads = [threading.Thread(target=launch) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with ended(at, 1):
            assert sorted(launches) == [("attached", 1)] * 3 + [("started", 1)]
            assert at.attempt_numbers() == [1]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "step", ["newest_claimed", "Chain", "pending_of", "_refuse_other_training", "claim_attempt"]
)
def test_a_rival_at_any_step_of_a_launch_is_attached_to_or_attaches(
    root: RunRoot, monkeypatch: pytest.MonkeyPatch, step: str, when: str
) -> None:
    real = getattr(attempts, step)
    rivals: list[Launch] = []

    def rival() -> None:
        if not rivals:
            monkeypatch.setattr(attempts, step, real)
            rivals.append(start(root, guard=LIVE))

    def stepped(*args: Any, **named: Any) -> Any:
        if when == "before":
            rival()
        answer = real(*args, **named)
        rival()
        return answer

    monkeypatch.setattr(attempts, step, stepped)
    ours = start(root, guard=LIVE)
    with ended(root, 1):
        assert root.attempt_numbers() == [1]
        assert sorted((launch.how, launch.attempt) for launch in (ours, *rivals)) == [
            ("attached", 1),
            ("started", 1),
        ]


def test_a_won_attempt_holds_the_frozen_run_file(root: RunRoot) -> None:
    launch = start(root, plan_json='{"a": 1}', env={"X": "1"}, grace_s=5.0, lease_s=3.0)
    assert (launch.how, launch.attempt) == ("started", 1)
    attempt = root.attempt(1)
    assert attempt.run.read_text() == root.run.read_text() == SPEC
    assert attempt.plan.read_text() == root.plan.read_text() == '{"a": 1}'
    asked = AttemptFile.read(attempt)
    assert (asked.training_digest, asked.lease_s, asked.env) == ("t", 3.0, {"X": "1"})
    claim = read_claim(attempt)
    assert (claim.launcher, claim.pid, claim.spec_digest) == (
        "local",
        os.getpid(),
        spec_digest(SPEC),
    )


def test_a_live_run_of_the_same_training_is_attached_to(root: RunRoot) -> None:
    start(root)
    own(root, 1)
    same = start(root)
    assert (same.how, same.attempt, same.notice) == ("attached", 1, "")
    longer = start(root, LONGER)
    assert longer.how == "attached"
    assert "core.max_updates: 10 -> 20" in longer.notice
    assert root.run.read_text() == SPEC


def test_a_live_run_of_another_training_is_refused_with_the_difference(root: RunRoot) -> None:
    start(root)
    own(root, 1)
    with pytest.raises(ConfigError) as caught:
        start(root, OTHER, "u")
    assert "core.lr: 0.001 -> 0.002" in caught.value.message
    assert caught.value.detail["live"] == "t"
    assert caught.value.detail["asked"] == "u"
    assert root.attempt_numbers() == [1]


def test_a_committed_run_is_not_taken_up_by_another_training(root: RunRoot) -> None:
    start(root)
    chain = own(root, 1)
    commit(chain, "t")
    end(chain, "training")
    with pytest.raises(ConfigError, match=r"trained to update 5 .* core\.lr: 0\.001 -> 0\.002"):
        start(root, OTHER, "u")
    assert start(root, LONGER).attempt == 2


def test_before_the_first_commit_every_start_is_fresh(root: RunRoot) -> None:
    start(root)
    end(own(root, 1), "failed")
    assert start(root, OTHER, "u").how == "started"


def test_a_complete_run_starts_nothing(root: RunRoot) -> None:
    start(root)
    chain = own(root, 1)
    end(chain, "complete")
    launch = start(root)
    assert (launch.how, launch.attempt) == ("complete", 1)
    assert root.attempt_numbers() == [1]


def test_a_dead_owner_of_this_host_is_succeeded(root: RunRoot) -> None:
    start(root)
    own(root, 1, started=1.0)
    assert start(root).attempt == 2


def test_a_number_that_ever_owned_the_run_is_not_given_again(root: RunRoot) -> None:
    """A root filled from a copy begins with attempt 1, beside the epochs of a lost machine."""
    root.create()
    own(root, 3, host="lost")
    own(root, 1, started=1.0)
    assert start(root).attempt == 4


def test_an_owner_elsewhere_is_succeeded_only_by_who_found_it_lost(root: RunRoot) -> None:
    start(root)
    own(root, 1, host="elsewhere")
    assert start(root).how == "attached"
    assert start(root, guard=LIVE, lost_attempt=1).attempt == 2
    with ended(root, 2):
        # The next one is not the one that was lost: it is waited for.
        again = start(root, lost_attempt=1)
        assert (again.how, again.attempt) == ("attached", 2)


def test_an_attempt_whose_guard_never_owned_the_run_is_succeeded(root: RunRoot) -> None:
    start(root)
    collected(root, 1)
    assert start(root).attempt == 2


def test_who_comes_after_a_job_that_was_turned_away_attaches_to_the_owner(root: RunRoot) -> None:
    start(root)
    own(root, 1)
    second = root.attempt(2)
    claim = read_claim(root.attempt(1)).model_copy(update={"launcher": "beaker", "host": "there"})
    claim_attempt(second, claim)
    assert start(root).attempt == 2
    said = TurnedAway(pid=7, host="there", reason="owned", time=0.0)
    second.turned_away.write_bytes(said.encode())
    assert (start(root).how, start(root).attempt) == ("attached", 1)


def test_a_launcher_of_another_host_that_started_no_guard_is_not_waited_for_without_end(
    root: RunRoot, monkeypatch
) -> None:
    root.create()
    here = make_claim(launcher="local", spec_digest="s", training_digest="t", time=time.time())
    claim_attempt(root.attempt(1), here.model_copy(update={"host": "elsewhere"}))
    assert start(root).how == "attached"
    assert isinstance(ensure(root, "finish", timeout_s=0), Running)
    later = time.time() + STARTED_WITHIN_S + 1
    monkeypatch.setattr("runtime.rundir.claims.time.time", lambda: later)
    lost = ensure(root, "finish", timeout_s=0)
    assert isinstance(lost, Lost)
    assert (lost.attempt, start(root, lost_attempt=lost.attempt).attempt) == (1, 2)
    # One whose guard was started may be at work before it owns the run: it is not given up.
    root.attempt(1).started.write_bytes(Started(pid=1, started=1.0).encode())
    assert not pending_of(root.attempt(1), (), HostBoot.here()).is_over


def test_a_launcher_that_fails_gives_its_claim_back(root: RunRoot) -> None:
    with pytest.raises(FileNotFoundError):
        start(root, guard=("/nonexistent/guard",))
    assert not root.attempt(1).claim.exists()
    assert start(root).attempt == 1


def test_a_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert spec_digest('{"a": 1, "b": {"c": 2, "d": 3}}') == spec_digest(
        '{"b": {"d": 3, "c": 2}, "a": 1}'
    )
    assert spec_digest('{"a": 1}') != spec_digest('{"a": 2}')


def test_differences_name_dotted_fields() -> None:
    theirs = json.dumps({"a": {"b": 1, "c": [1, 2]}, "gone": None, "same": 1})
    ours = json.dumps({"a": {"b": 2, "c": [1, 3]}, "new": {"x": True}, "same": 1})
    assert differences(ours, theirs) == [
        "a.b: 1 -> 2",
        "a.c: [1, 2] -> [1, 3]",
        "gone: null -> absent",
        "new.x: absent -> true",
    ]
    env = [json.dumps({"launch": {"env": {"WHERE": value}}}) for value in ("here", "there")]
    assert differences(*env) == ["launch.env.WHERE: differs"]
    many = differences(json.dumps({str(i): i for i in range(50)}), "{}")
    assert len(many) == 21
    assert many[-1] == "and 31 more"


def test_a_real_guard_from_start_to_complete(root: RunRoot, monkeypatch) -> None:
    """Launch, wait through ensure alone, and find everything ended: no process is left."""
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    dummy = Path(__file__).parent.parent / "session" / "dummy_session.py"
    launch = LocalLaunch().start(
        root,
        SPEC,
        "t",
        run="t",
        lease_s=3.0,
        session=(sys.executable, str(dummy)),
        env={"DUMMY": json.dumps({"updates": 3})},
    )
    answer = ensure(root, "finish", timeout_s=20, poll_s=0.02)
    assert isinstance(answer, Done), answer
    assert answer.receipt.update == 3
    assert isinstance(ensure(root, "checkpoint/2", timeout_s=0), Done)
    assert isinstance(ensure(root, "evaluation/2/x", timeout_s=0), Ended)
    collected(root, launch.attempt)
    assert start(root).how == "complete"
