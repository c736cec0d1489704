from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.load import load_run
from flows.commands.run import named

LAPTOP = "configs/presets/laptop.toml"
HEAVY = ("torch", "ray", "prefect", "sglang", "transformers", "numpy", "pyarrow", "rich", "aiohttp")


def milepost(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"NO_COLOR": "1"},
    )


@pytest.mark.parametrize("command", ["plan", "validate"])
@pytest.mark.parametrize("simulate", [False, True])
def test_nothing_heavy_is_loaded(command: str, simulate: bool) -> None:
    extra = ["--simulate"] if simulate and command == "plan" else []
    code = (
        "import sys\n"
        "from flows.cli import main\n"
        "try:\n"
        f"    main({[command, LAPTOP, *extra]!r})\n"
        "except SystemExit as end:\n"
        "    code = end.code\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.stderr.write(repr((code, loaded)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == "(0, [])"


def test_plan_answers_with_one_object() -> None:
    done = milepost("plan", LAPTOP, "--json", "--set", "core.max_updates = 7")
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert answer["schedule"]["updates"] == 7
    assert answer["concurrency"] == 512


def test_plan_ends_with_what_was_not_checked() -> None:
    done = milepost("plan", LAPTOP)
    assert done.returncode == 0
    assert done.stdout.rstrip().endswith("- the job's network")


@pytest.mark.parametrize("command", ["plan", "validate"])
def test_problems_end_with_1_and_all_show(command: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "x"\nsede = 1\n[core]\nlr = "1"\n')
    done = milepost(command, str(path))
    assert done.returncode == 1
    assert "did you mean seed?" in done.stderr
    assert "core.lr" in done.stderr
    assert "Traceback" not in done.stderr
    answer = json.loads(milepost(command, str(path), "--json").stdout)
    assert answer["ok"] is False
    assert {"sede", "core.lr"} <= {problem["field"] for problem in answer["problems"]}
    assert "Traceback" in milepost(command, str(path), "--debug").stderr


@pytest.mark.parametrize(
    "arguments", [("plan",), ("plan", "absent.toml"), ("plan", LAPTOP, "--what"), ("fly",)]
)
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...]) -> None:
    assert milepost(*arguments).returncode == 2


def test_validate_lists_problems_of_inputs_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'name = "x"\n[model]\nrecipe = "laptop"\n[data]\ntrain = "absent.jsonl"\n'
        '[reward]\nverifier = "math"\n[output]\nroot = "out"\n'
    )
    done = milepost("validate", str(path), "--json")
    (problem,) = json.loads(done.stdout)["problems"]
    assert done.returncode == 1
    assert (problem["field"], problem["line"]) == ("data.train", 5)
    assert milepost("plan", str(path)).returncode == 0


@pytest.mark.parametrize(("seconds", "code"), [("5.0", 1), ('"a"', 1), ("10.0", 0)])
def test_validate_holds_engines_to_the_keepalive_order(seconds: str, code: int) -> None:
    done = milepost(
        "validate", LAPTOP, "--json", "--set", f"rollout.engine_args = {{keepalive_s = {seconds}}}"
    )
    answer = json.loads(done.stdout)
    assert done.returncode == code, answer
    named = [problem["field"] for problem in answer["problems"]]
    assert named == (["rollout.engine_args.keepalive_s"] if code else [])


def test_validate_skips_mounts_and_lists_what_is_missing() -> None:
    asked = ("validate", "configs/presets/node.toml", "--set", "checkpoint.every_seconds=60")
    answer = json.loads(milepost(*asked, "--json").stdout)
    assert answer["ok"]
    assert any(line.startswith("model.path") for line in answer["skipped"])
    assert any("checkpoint.every_seconds" in line for line in answer["not_available"])


def test_help_names_every_command() -> None:
    done = milepost("--help")
    assert done.returncode == 0
    assert "plan" in done.stdout
    assert "validate" in done.stdout


def test_what_comes_next_is_said_of_this_run(tmp_path: Path) -> None:
    assert named(load_run(LAPTOP)).endswith(LAPTOP)
    assert named(load_run(LAPTOP, [f'output.root="{tmp_path}"'])) == str(tmp_path)
