"""The Ray backend over HTTP: one job a key, lost answers, tokens, classes; and how a job begins."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from configs.load import LoadedRun, load_run
from runtime.errors import ConfigError, CredentialsRefused, LaunchRefused, ServiceUnavailable
from runtime.launch.entry import CODE_VARIABLE, keep_code, take
from runtime.launch.ray_jobs import RayJobs, classify, ray_token
from runtime.launch.receipts import Receipts
from runtime.launch.standing import AttemptClass
from runtime.launch.submission import PAYLOAD_VARIABLE, Payload, attempt_key
from runtime.launch.submitting import Sender, submit_run
from runtime.rundir.claims import read_claim
from runtime.rundir.layout import RunRoot
from tests.runtime.launch import fake_ray_jobs
from tests.runtime.launch.fake_ray_jobs import TOKEN, FakeJobs
from tests.runtime.launch.submissions import PRESETS, submission


@pytest.fixture
def jobs() -> Iterator[FakeJobs]:
    with fake_ray_jobs.serving() as fake:
        yield fake


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout with a changed, an untracked and an ignored file."""
    top = tmp_path / "checkout"
    top.mkdir()
    (top / ".gitignore").write_text("runs/\n")
    (top / "a.py").write_text("old\n")
    run = ["git", "-C", str(top), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run([*run, "init", "-q"], check=True)
    subprocess.run([*run, "add", "-A"], check=True)
    subprocess.run([*run, "commit", "-q", "-m", "one"], check=True)
    (top / "a.py").write_text("new\n")
    (top / "b.py").write_text("untracked\n")
    (top / "runs").mkdir()
    (top / "runs" / "big").write_text("ignored")
    return top


@pytest.fixture
def loaded(jobs: FakeJobs, tmp_path: Path) -> LoadedRun:
    sets = [
        'launch.backend="ray"', f'launch.cluster="{jobs.url}"', f'output.root="{tmp_path / "run"}"',
        f'launch.weka_mounts=["{tmp_path}"]', 'launch.auto_resume="milepost"',
    ]  # fmt: skip
    return load_run(PRESETS / "laptop.toml", sets)


def sender(jobs: FakeJobs, checkout: Path, tmp_path: Path, token: str | None = TOKEN) -> Sender:
    secret = SecretStr(token) if token else None
    backend = RayJobs(jobs.url, token=secret, checkout=checkout)
    return Sender(backend=backend, receipts=Receipts(tmp_path / "receipts"))


def test_one_job_a_key_and_the_checkout_travels(
    jobs: FakeJobs, loaded: LoadedRun, checkout: Path, tmp_path: Path
) -> None:
    by = sender(jobs, checkout, tmp_path)
    assert submit_run(loaded, by).how == "started"
    assert submit_run(loaded, by).how == "attached"
    root = loaded.spec.output.root
    assert list(jobs.jobs) == [attempt_key("laptop", root, 1)]
    asked = jobs.jobs[attempt_key("laptop", root, 1)]["asked"]
    env = asked["runtime_env"]["env_vars"]
    assert env[CODE_VARIABLE] == "1"
    assert Payload.decode(env[PAYLOAD_VARIABLE]).order.ray == "job"
    ((name, content),) = jobs.packages.items()
    assert asked["runtime_env"]["working_dir"] == f"gcs://{name}"
    with zipfile.ZipFile(io.BytesIO(content)) as packed:
        assert packed.namelist() == [".gitignore", "a.py", "b.py"]
        assert packed.read("a.py") == b"new\n"
    claim = read_claim(RunRoot.of(root).attempt(1))
    assert claim.launcher == "ray"
    assert not RunRoot.of(root).attempt(1).run.exists()  # the job writes its own attempt


def test_a_lost_answer_does_not_submit_twice(
    jobs: FakeJobs, loaded: LoadedRun, checkout: Path, tmp_path: Path
) -> None:
    jobs.lose_answers = 1
    assert submit_run(loaded, sender(jobs, checkout, tmp_path)).attempt == 1
    assert (jobs.num_posts, len(jobs.jobs)) == (1, 1)


def test_a_submitter_that_died_after_its_claim_is_followed_by_itself(
    jobs: FakeJobs, loaded: LoadedRun, checkout: Path, tmp_path: Path
) -> None:
    receipts = Receipts(tmp_path / "receipts")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listened on: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        away = RayJobs(url, token=SecretStr(TOKEN), checkout=checkout)
        with pytest.raises(ServiceUnavailable):
            submit_run(loaded, Sender(backend=away, receipts=receipts))
    root = RunRoot.of(loaded.spec.output.root)
    assert root.attempt(1).claim.exists()
    assert submit_run(loaded, sender(jobs, checkout, tmp_path)).attempt == 1
    assert len(jobs.jobs) == 1


@pytest.mark.parametrize("token", [None, "wrong"])
def test_the_token_counts(
    jobs: FakeJobs, loaded: LoadedRun, checkout: Path, tmp_path: Path, token: str | None
) -> None:
    with pytest.raises(CredentialsRefused, match="RAY_AUTH_TOKEN"):
        submit_run(loaded, sender(jobs, checkout, tmp_path, token))


def test_secrets_are_refused_and_nothing_is_claimed(
    jobs: FakeJobs, checkout: Path, tmp_path: Path
) -> None:
    sets = [
        'launch.backend="ray"', f'output.root="{tmp_path / "run"}"',
        f'launch.weka_mounts=["{tmp_path}"]', 'launch.secrets={HF_TOKEN="a-secret"}',
    ]  # fmt: skip
    with pytest.raises(LaunchRefused, match=r"launch\.secrets \(HF_TOKEN\)"):
        submit_run(load_run(PRESETS / "laptop.toml", sets), sender(jobs, checkout, tmp_path))
    assert jobs.num_posts == 0
    assert not (tmp_path / "run").exists()


def test_a_token_comes_from_the_environment_or_its_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("from-file\n")
    assert ray_token({"RAY_AUTH_TOKEN": "t", "RAY_AUTH_TOKEN_PATH": str(path)}) == SecretStr("t")
    assert ray_token({"RAY_AUTH_TOKEN_PATH": str(path)}) == SecretStr("from-file")
    assert ray_token({"RAY_AUTH_TOKEN": "t", "RAY_AUTH_MODE": "disabled"}) is None
    assert ray_token({}) is None


@pytest.mark.parametrize(
    ("job", "kind"),
    [
        ({"status": "PENDING"}, AttemptClass.PENDING),
        ({"status": "RUNNING"}, AttemptClass.RUNNING),
        ({"status": "SUCCEEDED", "driver_exit_code": 0}, AttemptClass.SUCCEEDED),
        ({"status": "STOPPED"}, AttemptClass.CANCELED),
        (
            {"status": "FAILED", "driver_exit_code": 1,
             "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR"},
            AttemptClass.FAILED,
        ),
        ({"status": "FAILED", "error_type": "RUNTIME_ENV_SETUP_FAILURE"}, AttemptClass.FAILED),
        ({"status": "FAILED", "error_type": "JOB_SUPERVISOR_ACTOR_DIED"}, AttemptClass.INTERRUPTED),
        ({"status": "FAILED"}, AttemptClass.INTERRUPTED),
        ({"status": "new to us"}, AttemptClass.STOPPED),
    ],
)  # fmt: skip
def test_class_of_a_job(job: dict[str, Any], kind: AttemptClass) -> None:
    assert classify(job).kind is kind


# -- what a job begins with ----------------------------------------------------------------------


def test_a_job_takes_the_attempt_that_its_launcher_claimed(
    loaded: LoadedRun, tmp_path: Path
) -> None:
    payload = submission(loaded, image=None, backend="ray").payload
    decoded = Payload.decode(payload.encode())
    assert decoded == payload
    attempt = RunRoot(payload.root).attempt(1)
    take(attempt, payload)
    before = attempt.attempt.stat().st_mtime_ns
    take(attempt, payload)  # a scheduler's own retry finds everything there
    assert attempt.attempt.stat().st_mtime_ns == before
    assert json.loads(attempt.run.read_text())["name"] == "laptop"


def test_a_job_of_another_run_file_does_not_take_it(loaded: LoadedRun, tmp_path: Path) -> None:
    payload = submission(loaded, image=None, backend="ray").payload
    attempt = RunRoot(payload.root).attempt(1)
    take(attempt, payload)
    other = submission(
        load_run(PRESETS / "laptop.toml", [*loaded.sets, "core.max_updates=7"]), image=None
    ).payload
    with pytest.raises(ConfigError, match=r"core\.max_updates: 420 -> 7"):
        take(attempt, other)


def test_a_payload_of_another_version_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="image of the same version"):
        Payload.decode("bm90IGEgcGF5bG9hZA==")


def test_code_that_travelled_is_kept_in_the_attempt(loaded: LoadedRun, tmp_path: Path) -> None:
    payload = submission(loaded, image=None, backend="ray").payload
    attempt = RunRoot(payload.root).attempt(1)
    take(attempt, payload)
    here = Path.cwd()
    try:
        settled = keep_code(attempt, {"PYTHONPATH": f"/other{os.pathsep}/more"})
        keep_code(attempt, {})
    finally:
        os.chdir(here)
    assert settled["PYTHONPATH"].split(os.pathsep) == [str(attempt.code), "/other", "/more"]
    said = subprocess.run(
        [sys.executable, "-c", "import runtime.session.guard as g; print(g.__file__)"],
        env={**os.environ, **settled},
        cwd=attempt.code,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.startswith(str(attempt.code))
