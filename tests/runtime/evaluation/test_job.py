"""Tries of a background evaluation on a real embedded engine, from a run directory alone."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import anyio
import psutil
import pytest

from configs.load import load_run
from configs.plan import make_plan
from runtime.checkpoints.commit import Committer
from runtime.checkpoints.export import read_receipt
from runtime.checkpoints.from_commit import export_update, trainer_of
from runtime.clock import SystemClock
from runtime.data.frozen import open_frozen
from runtime.data.ledger import Ledger
from runtime.data.order import PromptOrder
from runtime.errors import OwnedError
from runtime.evaluation.files import write_request
from runtime.evaluation.job import JobOrder, run_job
from runtime.evaluation.opening import Asker, frozen_set
from runtime.evaluation.receipts import derive
from runtime.evaluation.records import Snapshot
from runtime.evaluation.snapshots import (
    SnapshotMissing,
    find_weights,
    make_weights,
    snapshot_of,
)
from runtime.evaluation.submission import Rules, submit_due
from runtime.policy import PolicyId
from runtime.recipes import laptop
from runtime.rundir import atomic
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.session.preparing import Prepared, run_preparation
from tests.runtime.checkpoints.tiny_run import IDENTITY, take_over
from tests.runtime.evaluation.owed import Jobs

pytestmark = pytest.mark.timeout(180)
PROMPTS = 8
POLICY = PolicyId(1, 0)
VERIFIER = '''
"""Scores slowly; kills the engine once, and has no verdict for one prompt, when told to."""
import pathlib
import time

import psutil

HERE = pathlib.Path(__file__).parent


def score(response, answer, metadata):
    if (HERE / "slow").exists():
        time.sleep(0.2)
    if (HERE / "kill").exists():
        (HERE / "kill").unlink()
        for process in psutil.Process().parent().children():
            if "runtime.engines.embedded.server" in process.cmdline():
                process.kill()
    if (HERE / "crash").exists() and answer == (HERE / "crash").read_text():
        raise RuntimeError("no verdict on this one")
    return float(len(response) > 0)
'''
RUN_FILE = """
name = "job"
[model]
path = "{made}/model"
dtype = "float32"
[data]
train = "{made}/train.jsonl"
max_prompt_tokens = 32
[rollout]
max_running_requests = 1
max_response_tokens = 24
[reward]
verifier = "slowly:score"
workers = 1
skip_budget = 0.2
[core]
max_updates = 1
[health]
interval = "1s"
[evaluation]
mode = "background"
[evaluation.sets.held]
prompts = "{made}/holdout.jsonl"
[output]
root = "run"
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "laptop"
    laptop.make(folder, seed=3, prompts=8, holdout=PROMPTS, warm_up_until=None)
    return folder


class Job:
    """A prepared run whose commit 0 stands, and one evaluation of it."""

    def __init__(self, folder: Path, made: Path) -> None:
        self.folder = folder
        (folder / "slowly.py").write_text(VERIFIER)
        (folder / "run.toml").write_text(RUN_FILE.format(made=made))
        loaded = load_run(folder / "run.toml", [])
        self.spec = loaded.spec
        self.root = RunRoot.of(loaded.spec.output.root)
        self.root.create()
        atomic.write_bytes(self.root.run, loaded.spec.model_dump_json().encode())
        atomic.write_bytes(self.root.plan, make_plan(loaded).model_dump_json().encode())
        self.prepared: Prepared = run_preparation(loaded.spec, self.root)
        take_over(self.root)
        anyio.run(self._commit)
        found = self.prepared.sets["held"]
        store = open_frozen(Path(found.data))
        self.frozen = frozen_set(self.spec, "held", store=store, fingerprint=found.fingerprint)
        self.answers = [json.loads(line)["answer"] for line in (made / "holdout.jsonl").open()]

    async def _commit(self) -> None:
        async def committed(record: object, segment: object) -> None:
            pass

        async with anyio.create_task_group() as tasks:
            committer = Committer(
                root=self.root, epoch=1, identity=IDENTITY, source=None,  # type: ignore[arg-type]
                tasks=tasks, on_committed=committed, parent=None,
            )  # fmt: skip
            ledger = Ledger(PromptOrder(8, epochs=1))
            await committer.commit_initial(ledger.snapshot(), POLICY, {"model": "m"})

    @property
    def evaluation(self) -> Path:
        return self.root.evaluation(str(POLICY), "held")

    def ask(self, snapshot: Snapshot | None = None) -> None:
        asker = Asker(run="job", attempt=1, epoch=1, clock=SystemClock())
        asked = asker.request(self.frozen, POLICY, "final", mode="background", snapshot=snapshot)
        write_request(self.evaluation, asked)

    def snapshot(self) -> Snapshot:
        async def make() -> Snapshot:
            asker = Asker(run="job", attempt=1, epoch=1, clock=SystemClock())
            asked = asker.request(self.frozen, POLICY, "final", mode="background")
            trainer = trainer_of(self.spec)
            weights = await make_weights(
                self.root, Chain(self.root).read(), asked,
                model=Path(self.prepared.model), trainer=trainer,
            )  # fmt: skip
            await trainer.shutdown()
            return snapshot_of(weights.folder, weights.receipt, is_leased=True)

        return anyio.run(make)

    def order(self, number: int, flow_run: str | None = None) -> JobOrder:
        return JobOrder(
            root=self.root, policy=str(POLICY), set_name="held", number=number, flow_run=flow_run
        )

    def run(self, number: int) -> dict[str, float]:
        return anyio.run(run_job, self.order(number)).metrics

    def items(self) -> list[int]:
        path = self.evaluation / "items.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["index"] for line in lines if line.endswith("}")]


@pytest.fixture
def job(tmp_path: Path, made: Path) -> Job:
    return Job(tmp_path, made)


def test_after_kills_of_the_job_and_of_its_engine_no_item_is_repeated(job: Job) -> None:
    job.ask(job.snapshot())
    (job.folder / "slow").touch()
    victim = start(job, 0)
    until(lambda: len(job.items()) >= 2, victim)
    servers = [
        child
        for child in psutil.Process(victim.pid).children()
        if "runtime.engines.embedded.server" in child.cmdline()
    ]
    assert len(servers) == 1
    victim.kill()
    victim.wait()
    _, left = psutil.wait_procs(servers, timeout=30)
    assert left == []  # no engine outlives its evaluation
    done = set(job.items())
    assert 2 <= len(done) < PROMPTS

    (job.folder / "kill").touch()
    metrics = job.run(1)
    assert not (job.folder / "kill").exists()  # the engine was killed, and came back
    assert metrics["num_prompts"] == PROMPTS
    assert metrics["num_missing"] == 0
    times = Counter(job.items())
    assert set(times) == set(range(PROMPTS))
    # One line may have been half written when the process was killed.
    assert set(times.values()) == {1}


def start(job: Job, number: int) -> "subprocess.Popen[bytes]":
    code = (
        "import anyio, sys\n"
        "from runtime.evaluation.job import JobOrder, run_job\n"
        "from runtime.rundir.layout import RunRoot\n"
        "root, policy, number = sys.argv[1:]\n"
        "order = JobOrder(root=RunRoot.of(root), policy=policy, set_name='held',"
        " number=int(number))\n"
        "anyio.run(run_job, order)\n"
    )
    command = [sys.executable, "-c", code, str(job.root.path), str(POLICY), str(number)]
    return subprocess.Popen(command, env=os.environ)


def until(is_so, process: "subprocess.Popen[bytes]") -> None:
    while not is_so():
        assert process.poll() is None, "it ended before"
        time.sleep(0.02)


def test_a_snapshot_with_a_changed_byte_is_reported_with_what_to_do(job: Job) -> None:
    snapshot = job.snapshot()
    job.ask(snapshot)
    weights = next(Path(snapshot.path).glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(SnapshotMissing, match=r"milepost export .* --update 0"):
        job.run(0)
    receipt = derive(job.evaluation, stands=True)
    assert receipt is not None
    assert (receipt.state, receipt.reason, receipt.next_try_at) == (
        "skipped", "snapshot_missing", None,
    )  # fmt: skip
    assert job.items() == []


def test_a_deleted_snapshot_is_reported_and_an_export_stands_in_for_it(job: Job) -> None:
    snapshot = job.snapshot()
    job.ask(snapshot)
    shutil.rmtree(snapshot.path)
    with pytest.raises(SnapshotMissing, match=r"milepost export .* --update 0"):
        job.run(0)
    receipt = derive(job.evaluation, stands=True)
    assert receipt is not None
    assert (receipt.reason, receipt.next_try_at) == ("snapshot_missing", None)
    anyio.run(partial(export_update, job.root, job.spec, model=Path(job.prepared.model), update=0))
    found = find_weights(job.root, Chain(job.root).read(), receipt.request)
    assert found is not None
    assert found.folder == job.root.export_at(0)


class Killed(BaseException):
    pass


STAGES = [
    ("link", "started.json"),  # claimed, not begun
    ("mkdir", ".e1.u0-e1.writing"),  # begun, no snapshot yet
    ("rename", ".e1.u0-e1.writing"),  # the snapshot is whole, and has no name
    ("link", "result.json"),  # every item is written, no result
]
"""Between them lie the items, whose kill is the test before's."""


@pytest.mark.timeout(1200)
def test_a_try_that_is_killed_at_any_stage_is_followed_by_one_that_goes_on(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a commit without a snapshot, which the tries export, with a prompt that has no verdict."""
    (job.folder / "crash").write_text(job.answers[3])
    job.ask()
    jobs = Jobs()
    for stage in [*STAGES, None]:
        rules = Rules(by="test", force=True)
        (row,) = submit_due(job.root, jobs, rules, clock=SystemClock())
        assert row.verdict == "submitted"
        key, order = jobs.orders[-1]

        def probe(operation: str, path: Path, stage=stage) -> None:
            if (operation, path.name) == stage:
                raise Killed

        monkeypatch.setattr(atomic, "probe", probe)
        assert is_killed(order) == (stage is not None)
        monkeypatch.setattr(atomic, "probe", None)
        jobs.states[key] = "over"

    receipt = derive(job.evaluation, stands=True)
    assert receipt is not None
    reasons = [t.result.reason for t in receipt.tries if t.result is not None]
    assert reasons == ["crashed"] * len(STAGES) + [None]
    assert receipt.state == "succeeded"
    assert sorted(job.items()) == list(range(PROMPTS))  # each once
    assert [path.name for path in job.root.snapshots.iterdir()] == [str(POLICY)]
    exported = read_receipt(job.root.snapshots / str(POLICY))
    assert exported is not None
    assert exported.source == "commit"
    (row,) = submit_due(job.root, jobs, Rules(by="test", force=True), clock=SystemClock())
    assert row.verdict == "done"
    assert_never_evaluated_again(job, tries=len(STAGES) + 1)


def assert_never_evaluated_again(job: Job, *, tries: int) -> None:
    before = (job.evaluation / "items.jsonl").read_bytes()
    metrics = job.run(tries)
    assert (metrics["num_prompts"], metrics["num_missing"]) == (PROMPTS - 1, 1)
    receipt = derive(job.evaluation, stands=True)
    assert receipt is not None
    (result,) = [t.result for t in receipt.tries if t.result is not None and t.result.metrics]
    assert result.metrics == metrics
    assert (job.evaluation / "items.jsonl").read_bytes() == before
    assert len(list((job.evaluation / "tries").iterdir())) == tries


def is_killed(order: JobOrder) -> bool:
    try:
        anyio.run(run_job, order)
    except BaseExceptionGroup as error:
        if error.subgroup(Killed) is None:
            raise
        return True
    except Killed:
        return True
    return False


def test_a_try_that_another_process_runs_is_left_alone(job: Job) -> None:
    job.ask(Snapshot(path="/nowhere", digest="d"))
    with pytest.raises(SnapshotMissing):
        anyio.run(run_job, job.order(0, flow_run="one"))
    (job.evaluation / "tries" / "0" / "result.json").unlink()
    with pytest.raises(OwnedError, match="flow run one"):
        anyio.run(run_job, job.order(0, flow_run="another"))
    assert not (job.evaluation / "tries" / "0" / "result.json").exists()
