"""Submitting to Beaker over its real wire: found again after a lost answer, bounded, classed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer.testing

pytest.importorskip("beaker", reason="pip install -e '.[launch]'")

from configs.load import LoadedRun
from configs.plan import make_plan
from flows.cli import build_app
from runtime.errors import CredentialsRefused, LaunchRefused, ServiceUnavailable
from runtime.launch.beaker import beaker_backend
from runtime.launch.beaker_document import beaker_document
from runtime.launch.composing import scheduler_claim, submission_of
from runtime.launch.receipts import Receipts
from runtime.launch.standing import AttemptClass, RankStanding, of_ranks
from runtime.launch.submitting import Sender, submit_run
from runtime.launch.watching import Watcher, decide
from runtime.rundir.layout import RunRoot
from tests.runtime.launch import fake_beaker
from tests.runtime.launch.fake_beaker import FakeBeaker
from tests.runtime.launch.submissions import IMAGE, PRESETS, three_node
from tests.runtime.launch.test_beaker_status import CANCELED, HISTORIES, RUNNING, job

WORKSPACE = "ai2/open-instruct-dev"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeBeaker]:
    with fake_beaker.serving(tmp_path_factory.mktemp("beaker")) as server:
        yield server


@pytest.fixture
def beaker(
    server: FakeBeaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeBeaker]:
    for name, value in server.config(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("BEAKER_TOKEN", raising=False)
    monkeypatch.setenv("MILEPOST_LAUNCH_RECEIPTS", str(tmp_path / "receipts"))
    server.experiments.clear()
    server.specs.clear()
    server.jobs.clear()
    server.canceled.clear()
    server.num_posts = 0
    yield server
    server.released.set()
    server.lose_answers = 0


def sender(deadline_s: float = 30.0) -> Sender:
    backend = beaker_backend(WORKSPACE, deadline_s=deadline_s)
    return Sender(backend=backend, image=IMAGE, revision="c0ffee", dirty=True)


@pytest.fixture
def loaded() -> LoadedRun:
    return three_node()


def test_what_is_posted_is_what_was_rendered_and_once(
    beaker: FakeBeaker, loaded: LoadedRun
) -> None:
    launch = submit_run(loaded, sender())
    assert (launch.how, launch.attempt) == ("started", 1)
    ((name, spec),) = beaker.specs.items()
    app = build_app(["plan"])
    printed = typer.testing.CliRunner().invoke(
        app, ["plan", str(PRESETS / "three-node.toml"), "--render", "--image", IMAGE]
    )
    assert json.loads(printed.stdout) == spec
    (receipt,) = Receipts().of_root(loaded.spec.output.root)
    assert (receipt.key, receipt.job, receipt.image) == (name, "ex1", IMAGE)
    assert (receipt.revision, receipt.dirty, receipt.auto_resume) == ("c0ffee", True, "milepost")
    assert receipt.requested_gpus == 24
    assert receipt.environment["LD_LIBRARY_PATH"].startswith("/usr/local/cuda/compat")
    assert submit_run(loaded, sender()).how == "attached"
    assert beaker.num_posts == 1


def test_a_lost_answer_is_settled_by_name(beaker: FakeBeaker, loaded: LoadedRun) -> None:
    beaker.lose_answers = 1
    launch = submit_run(loaded, sender())
    assert (launch.how, launch.attempt) == ("attached", 1)
    assert (beaker.num_posts, len(beaker.experiments)) == (1, 1)
    (receipt,) = Receipts().of_root(loaded.spec.output.root)
    assert receipt.job == "ex1"


def test_a_server_that_hangs_is_left_at_the_deadline(beaker: FakeBeaker, loaded: LoadedRun) -> None:
    beaker.released.clear()
    with pytest.raises(ServiceUnavailable, match=r"within 0\.5 s"):
        submit_run(loaded, sender(deadline_s=0.5))
    (receipt,) = Receipts().of_root(loaded.spec.output.root)
    assert receipt.job is None  # the key was written before the call
    beaker.released.set()
    assert submit_run(loaded, sender()).attempt == 1


def test_a_wrong_token_is_final(
    beaker: FakeBeaker, loaded: LoadedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in beaker.config(tmp_path, token="wrong").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CredentialsRefused):
        submit_run(loaded, sender())
    assert beaker.experiments == {}


def test_a_breach_is_refused_before_anything_is_sent(beaker: FakeBeaker, loaded: LoadedRun) -> None:
    with pytest.raises(LaunchRefused, match=r"image\.missing"):
        submit_run(loaded, replace(sender(), image=None))
    assert beaker.num_posts == 0
    assert Receipts().of_root(loaded.spec.output.root) == []


def test_a_preempted_attempt_is_submitted_again_under_the_next_number(
    beaker: FakeBeaker, loaded: LoadedRun
) -> None:
    by = sender()
    submit_run(loaded, by)
    watcher = Watcher(loaded, by)
    fill(beaker, [job(RUNNING, rank=rank, size=3, gpus=8, slots=8) for rank in range(3)])
    standing = watcher.look(1)
    assert (standing.kind, standing.active_gpus) == (AttemptClass.RUNNING, 24)
    # A slot more than was asked for, since the memory asked for took it; kept once it is over.
    fill(beaker, [job(RUNNING, rank=rank, size=3, gpus=8, slots=9) for rank in range(3)])
    watcher.look(1)
    fill(beaker, [job(RUNNING, rank=0, size=3, gpus=8, slots=9)])
    watcher.look(1)
    assert watcher.decide(1, standing).what == "wait"
    fill(beaker, [job(CANCELED, rank=rank, size=3, code=1 if rank else 9) for rank in range(3)])
    standing = watcher.look(1)
    decision = watcher.decide(1, standing)
    assert (standing.kind, decision.what) == (AttemptClass.PREEMPTED, "again")
    assert submit_run(loaded, by).how == "attached"
    kept = watcher.receipt(1)
    assert kept is not None
    assert (kept.requested_gpus, kept.active_gpus, kept.allocated_gpus) == (24, 24, 27)
    again = submit_run(loaded, by, reason=decision.why, lost_attempt=1)
    assert (again.how, again.attempt, beaker.num_posts) == ("started", 2, 2)
    plan = make_plan(loaded)
    claim = scheduler_claim("beaker", loaded.spec.model_dump_json(), plan)
    sent = submission_of(loaded, plan, attempt=2, image=IMAGE, claim=claim, reason=decision.why)
    assert list(beaker.specs.values())[1] == beaker_document(sent)
    assert [r.attempt for r in Receipts().of_root(loaded.spec.output.root)] == [1, 2]


def test_who_follows_an_attempt_that_has_begun_keeps_the_schedulers_id(
    beaker: FakeBeaker, tmp_path: Path
) -> None:
    """The job was submitted from elsewhere; only its scheduler can say what it is called there."""
    root = tmp_path / "run"
    mounts = json.dumps(["/weka/oe-adapt-default", str(tmp_path)])
    loaded = three_node(f'output.root="{root}"', f"launch.weka_mounts={mounts}")
    assert submit_run(loaded, sender()).how == "started"
    RunRoot.of(root).attempt(1).path.mkdir(exist_ok=True)
    RunRoot.of(root).attempt(1).attempt.write_text("{}")
    follower = replace(sender(), receipts=Receipts(tmp_path / "elsewhere"))
    assert submit_run(loaded, follower).how == "attached"
    (receipt,) = follower.receipts.of_root(root)
    (experiment,) = beaker.experiments.values()
    assert receipt.key != receipt.job == experiment.experiment.id
    assert beaker.num_posts == 1
    # Of an experiment that is gone there is nothing to see through, and nothing is sent again.
    beaker.experiments.clear()
    late = replace(sender(), receipts=Receipts(tmp_path / "late"))
    assert submit_run(loaded, late).how == "attached"
    assert late.receipts.of_root(root) == []
    assert beaker.num_posts == 1


def test_stopping_cancels_the_experiment(beaker: FakeBeaker, loaded: LoadedRun) -> None:
    by = sender()
    submit_run(loaded, by)
    (receipt,) = Receipts().of_root(loaded.spec.output.root)
    by.backend.stop(receipt)
    assert beaker.canceled == ["ex1"]


def test_the_stop_command_ends_what_cannot_be_reached(
    beaker: FakeBeaker, loaded: LoadedRun
) -> None:
    submit_run(loaded, sender())
    fill(beaker, [job(RUNNING, rank=rank, size=3) for rank in range(3)])
    command = ["stop", str(PRESETS / "three-node.toml")]
    asked = typer.testing.CliRunner().invoke(build_app(["stop"]), command)
    assert (asked.exit_code, beaker.canceled) == (0, ["ex1"])
    fill(beaker, [job(CANCELED, rank=rank, size=3, code=4) for rank in range(3)])
    again = typer.testing.CliRunner().invoke(build_app(["stop"]), command)
    assert (again.exit_code, beaker.canceled) == (6, ["ex1"])


def fill(beaker: FakeBeaker, jobs: list[Any]) -> None:
    (workload,) = list(beaker.experiments.values())[-1:]
    beaker.jobs[:] = []
    for each in jobs:
        each.task_id = workload.experiment.tasks[0].id
        beaker.jobs.append(each)


def test_the_status_command_classes_every_history(beaker: FakeBeaker, loaded: LoadedRun) -> None:
    submit_run(loaded, sender())
    app = build_app(["status"])
    wrong: dict[str, str] = {}
    for name, (jobs, expected) in HISTORIES.items():
        fill(beaker, jobs)
        told = typer.testing.CliRunner().invoke(
            app, ["status", str(PRESETS / "three-node.toml"), "--json"]
        )
        answer = json.loads(told.stdout)
        assert answer["scheduler"]["auto_resume"] == "milepost"
        if answer["scheduler"]["class"] != expected:
            wrong[name] = answer["scheduler"]["class"]
    assert wrong == {}


def test_the_status_command_shows_ranks_and_what_is_off(
    beaker: FakeBeaker, loaded: LoadedRun
) -> None:
    submit_run(loaded, sender())
    fill(beaker, [job(RUNNING, rank=0, size=3), job(RUNNING, rank=1, size=3, group="other")])
    told = typer.testing.CliRunner().invoke(
        build_app(["status"]), ["status", str(PRESETS / "three-node.toml")]
    )
    assert "attempt 1 at beaker: running" in told.stdout
    assert "GPUs: 24 requested, 0 active, 0 paid for" in told.stdout
    assert "rank 1" in told.stdout
    assert "live replicas are of 2 groups" in told.stdout


@pytest.mark.parametrize(
    ("kind", "auto", "attempt", "committing", "what"),
    [
        (AttemptClass.RUNNING, "milepost", 1, 0, "wait"),
        (AttemptClass.PREEMPTED, "milepost", 1, 0, "again"),
        (AttemptClass.INTERRUPTED, "milepost", 7, 5, "again"),
        (AttemptClass.PREEMPTED, "off", 1, 0, "over"),
        (AttemptClass.PREEMPTED, "scheduler", 1, 0, "over"),
        (AttemptClass.INTERRUPTED, "milepost", 5, 0, "over"),
        (AttemptClass.PREEMPTED, "milepost", 100, 100, "over"),
        (AttemptClass.FAILED, "milepost", 1, 0, "over"),
        (AttemptClass.CANCELED, "milepost", 1, 0, "over"),
        (AttemptClass.STOPPED, "milepost", 1, 0, "over"),
        (AttemptClass.SUCCEEDED, "milepost", 1, 0, "over"),
    ],
)
def test_who_goes_on_after_what(
    kind: AttemptClass, auto: str, attempt: int, committing: int, what: str
) -> None:
    from runtime.launch.standing import AttemptStanding

    standing = AttemptStanding(kind=kind, raw="x")
    decision = decide(standing, attempt=attempt, auto_resume=auto, last_committing=committing)
    assert decision.what == what


@pytest.mark.parametrize("auto", ["milepost", "off"])
def test_nobody_follows_while_a_replica_still_runs(auto: str) -> None:
    """It may own the run for a while yet, and would turn its successor away."""
    lost = RankStanding(rank=1, kind=AttemptClass.INTERRUPTED, raw="lost")
    for kind in AttemptClass:
        standing = of_ranks([RankStanding(rank=0, kind=kind, raw="x"), lost])
        decision = decide(standing, attempt=1, auto_resume=auto, last_committing=1)
        if not kind.is_over and auto == "milepost":
            assert (standing.kind, decision.what) == (AttemptClass.INTERRUPTED, "wait")
        elif kind is AttemptClass.INTERRUPTED and auto == "milepost":
            assert decision.what == "again"
        else:
            assert decision.what != "wait"


def test_back_off_grows_without_commits_and_starts_again_with_one() -> None:
    from runtime.launch.standing import AttemptStanding

    lost = AttemptStanding(kind=AttemptClass.PREEMPTED, raw="x")
    delays = [
        decide(lost, attempt=n, auto_resume="milepost", last_committing=0).delay_s
        for n in range(1, 5)
    ]
    assert delays == [10.0, 20.0, 40.0, 80.0]
    assert decide(lost, attempt=9, auto_resume="milepost", last_committing=9).delay_s == 10.0
