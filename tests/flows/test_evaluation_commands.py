"""`milepost export`, `evaluate` and `resubmit-evaluations`, from a run directory alone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws
from typer.testing import CliRunner

from flows.cli import build_app
from runtime.checkpoints.export import RECEIPT, read_receipt
from runtime.evaluation.files import claim_try, finish_try
from runtime.evaluation.receipts import derive
from runtime.evaluation.records import Result
from runtime.recipes import laptop
from tests.runtime.evaluation.test_job import POLICY, Job

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    made = tmp_path_factory.mktemp("made") / "laptop"
    laptop.make(made, seed=3, prompts=8, holdout=8, warm_up_until=None)
    return Job(tmp_path_factory.mktemp("run"), made)


def milepost(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(build_app(arguments), list(arguments))
    return done.exit_code, done.stdout


def test_a_commit_becomes_a_folder_and_objects(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        s3 = boto3.client("s3")
        s3.create_bucket(Bucket="exports")
        command = ("export", str(job.root.path), "--update", "0", "--json")
        code, said = milepost(*command, "--upload", "s3://exports/laptop")
        assert code == 0, said
        answer = json.loads(said)
        folder = Path(answer["path"])
        assert (answer["policy"], folder) == (str(POLICY), job.root.path / "export-0")
        listed = s3.list_objects_v2(Bucket="exports", Prefix="laptop/")["Contents"]
        assert {Path(o["Key"]).name for o in listed} == {p.name for p in folder.iterdir()}
        stored = s3.get_object(Bucket="exports", Key=f"laptop/{RECEIPT}")["Body"].read()
        assert stored == (folder / RECEIPT).read_bytes()
    before = (folder / RECEIPT).stat().st_mtime_ns
    assert milepost(*command)[0] == 0  # one that stands and is whole is kept
    assert (folder / RECEIPT).stat().st_mtime_ns == before
    next(folder.glob("*.safetensors")).write_bytes(b"damaged")
    assert milepost(*command)[0] == 0
    receipt = read_receipt(folder)
    assert receipt is not None
    assert (folder / RECEIPT).stat().st_mtime_ns > before


def test_an_update_without_a_commit_names_those_there_are(job: Job) -> None:
    code, said = milepost("export", str(job.root.path), "--update", "7", "--json")
    assert code == 1
    assert "there are: 0" in json.loads(said)["message"]


def without_a_server(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments, "--json"],
        env=os.environ
        | {"PREFECT_API_URL": "http://127.0.0.1:1/api", "PREFECT_CLIENT_MAX_RETRIES": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_what_is_asked_for_without_a_server_waits_and_its_result_is_shown_without_one(
    job: Job,
) -> None:
    root = str(job.root.path)
    code, refused = milepost("evaluate", root, "--update", "7", "--json")
    assert (code, json.loads(refused)["error"]) == (1, "ConfigError")
    code, said = without_a_server("evaluate", root)
    assert (code, said["error"]) == (1, "JobsAway")
    receipt = derive(job.evaluation, stands=True)
    assert receipt is not None
    assert receipt.state == "requested"

    claim_try(job.evaluation, by="test", time=1.0)
    finish_try(job.evaluation, 0, Result(time=2.0, state="succeeded", metrics={"mean": 0.5}))
    code, answer = milepost("evaluate", root, "--only", "held", "--json")
    (shown,) = json.loads(answer)["evaluations"]
    assert (code, shown["state"], shown["policy"]) == (0, "succeeded", str(POLICY))
    assert shown["metrics"] == {"mean": 0.5}


def test_without_a_server_nothing_is_claimed(job: Job) -> None:
    shutil.rmtree(job.evaluation, ignore_errors=True)
    job.ask()
    code, said = without_a_server("resubmit-evaluations", str(job.root.path))
    assert (code, said["error"]) == (1, "JobsAway")
    receipt = derive(job.evaluation, stands=True)
    assert receipt is not None
    assert receipt.state == "requested"
