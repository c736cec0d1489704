import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from runtime.analysis import report
from runtime.analysis.report import write_report

ROOT = Path(__file__).parents[3]
NewRun = Callable[[Path], Any]
"""Makes a synthetic run at a root (conftest)."""


class Page(HTMLParser):
    """What a browser would fetch, and the text a person reads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.words: list[str] = []
        self.ids: list[str] = []
        self.data: dict[str, dict[str, object]] = {}
        self._inside: list[str] = []
        self._is_data = False
        self.feed(text)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        for name in (
            "src",
            "href",
            "data",
            "poster",
            "srcset",
            "action",
            "formaction",
            "background",
        ):
            if given.get(name):
                self.fetched.append(f"{tag} {name}={given[name]}")
        if tag == "link":
            self.fetched.append("link")
        if chart := given.get("data-chart"):
            self.ids.append(chart)
        self._is_data = tag == "script" and given.get("type") == "application/json"
        if tag in {"script", "style"}:
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if self._is_data and self._inside:
            self.data = json.loads(data)
        elif self._inside and self._inside[-1] == "style":
            if "url(" in data or "@import" in data:
                self.fetched.append("style fetches")
        elif not self._inside:
            self.words.append(data)


def page(root: Path) -> Page:
    return Page(write_report(root).read_text())


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory, synthetic_run: NewRun) -> Path:
    """Two epochs: the first reached 34, the second restored 20 and made 21 to 60."""
    root = tmp_path_factory.mktemp("complete")
    run = synthetic_run(root)
    run.begin_epoch(None)
    run.learn(1, 34)
    run.begin_epoch(20)
    run.learn(21, 60)
    run.write_workflow(60, state="complete", activity=None)
    return root


@pytest.fixture
def copy(complete: Path, tmp_path: Path) -> Path:
    target = tmp_path / "run"
    shutil.copytree(complete, target)
    return target


def test_the_page_is_one_file_that_fetches_nothing(complete: Path) -> None:
    found = page(complete)
    assert found.fetched == []
    text = (complete / "reports" / "report.html").read_text()
    assert "default-src 'none'" in text
    assert text.count("</script>") == 3


def test_a_whole_run_has_every_chart_and_no_note(complete: Path) -> None:
    found = page(complete)
    assert set(found.ids) >= {
        "reward", "evaluation", "agreement", "loss", "gradient", "length", "cap", "staleness",
        "staleness-histogram", "lanes", "occupancy", "publication",
    }  # fmt: skip
    assert "Read with care" not in found.text
    assert "reverse-letters" in found.text
    assert "complete" in found.text
    assert "60 of 200" in found.text


def test_a_rewound_run_shows_the_newer_epoch_in_colour_and_the_older_in_grey(
    complete: Path,
) -> None:
    found = page(complete)
    traces: list[dict[str, object]] = found.data["length"]["traces"]  # type: ignore[assignment]
    grey = [t for t in traces if "superseded" in str(t["name"])]
    current = [t for t in traces if "superseded" not in str(t["name"])]
    assert [t["x"] for t in grey] == [list(range(21, 35))]
    assert [t["x"] for t in current] == [list(range(1, 61))]
    assert "--superseded" in str(grey[0]["line"])


def test_a_rewind_that_has_made_no_update_yet_greys_the_tail(
    copy: Path, synthetic_run: NewRun
) -> None:
    run = synthetic_run(copy)
    run.epoch = 2
    run.clock.advance(1000)
    run.begin_epoch(50)
    found = page(copy)
    traces: list[dict[str, object]] = found.data["loss"]["traces"]  # type: ignore[assignment]
    current = [t for t in traces if "superseded" not in str(t["name"])]
    assert current[0]["x"] == list(range(1, 51))


def test_colours_are_names_that_the_style_sheet_defines_twice(complete: Path) -> None:
    def names(value: object) -> Iterator[str]:
        if isinstance(value, str) and value.startswith("--"):
            yield value
        elif isinstance(value, dict):
            for inner in value.values():
                yield from names(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from names(inner)

    css = (Path(report.__file__).parent / "templates" / "report.css").read_text()
    light, dark = css.split("@media (prefers-color-scheme: dark)")
    used = set(names(page(complete).data))
    assert used
    for name in used:
        assert f"{name}:" in light, name
        assert f"{name}:" in dark.split("* {")[0], name


def test_an_unfinished_run_says_what_is_not_there_yet(
    tmp_path: Path, synthetic_run: NewRun
) -> None:
    run = synthetic_run(tmp_path)
    run.begin_epoch(None)
    run.learn(1, 3)
    run.write_workflow(3, outstanding=["evaluation/final/held_out"])
    found = page(tmp_path)
    assert "no evaluation has a result yet" in found.text
    assert "evaluation/final/held_out" in found.text
    assert "training · running" in found.text


def test_a_failed_run_shows_the_failure_and_the_next_look(
    tmp_path: Path, synthetic_run: NewRun
) -> None:
    run = synthetic_run(tmp_path)
    run.begin_epoch(None)
    failure = {
        "error_class": "PublicationFailed",
        "message": "no engine took <b>e1.u3</b></script><script>alert(1)</script>",
        "next_check": "the engine's log",
    }
    run.write_workflow(3, state="failed", activity=None, failure=failure)
    found = page(tmp_path)
    assert "PublicationFailed" in found.text
    assert "the engine's log" in found.text
    text = (tmp_path / "reports" / "report.html").read_text()
    assert "<script>alert(1)" not in text


def test_gpus_are_told_apart(tmp_path: Path) -> None:
    topology = {"replicas": 2, "gpus_per_replica": 8, "idle_gpus": 3}
    (tmp_path / "plan.json").write_text(json.dumps({"name": "x", "topology": topology}))
    assert "GPUs: 16 requested, 13 active" in page(tmp_path).text


def test_an_empty_root_gives_a_page_that_names_every_missing_file(tmp_path: Path) -> None:
    found = page(tmp_path)
    for name in (
        "workflow.json",
        "plan.json",
        "metrics.jsonl",
        "driver_timing.jsonl",
        "pipeline_occupancy.jsonl",
        "chain/",
        "contracts/",
    ):
        assert name in found.text, name


@pytest.mark.parametrize(
    "name",
    [
        "workflow.json",
        "plan.json",
        "metrics.jsonl",
        "driver_timing.jsonl",
        "pipeline_occupancy.jsonl",
        "contracts/policy_agreement.jsonl",
        "chain/0.json",
    ],
)
@pytest.mark.parametrize("damage", ["gone", "torn", "noise", "types"])
def test_any_damaged_file_costs_its_own_part_and_is_named(
    copy: Path, name: str, damage: str
) -> None:
    path = copy / name
    if damage == "gone":
        path.unlink()
    elif damage == "torn":
        path.write_bytes(path.read_bytes()[:-7])
    elif damage == "noise":
        path.write_bytes(random.Random(1).randbytes(500) + b"\n")
    else:
        # Valid JSON of the wrong types throughout.
        path.write_text(
            json.dumps(dict.fromkeys(("values", "update", "epoch", "seen"), "x")) + "\n"
        )
    found = page(copy)
    assert found.fetched == []
    if damage != "types" and name != "contracts/policy_agreement.jsonl":
        assert name.split("/")[0] in found.text


def test_a_number_that_is_not_finite_does_not_break_the_page(tmp_path: Path) -> None:
    row = {"schema_version": 1, "epoch": 1, "attempt": 1, "time": 1.0, "axis": "train/update"}
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({**row, "step": 1, "values": {"train/loss": float("inf")}})
        + "\n"
        + json.dumps({**row, "step": float("nan"), "values": {"train/loss": 1.0}})
        + "\n"
    )
    page(tmp_path)


def test_a_long_run_stays_a_small_page(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for i in range(20_000):
            row = {
                "schema_version": 1,
                "epoch": 1,
                "attempt": 1,
                "time": float(i),
                "axis": "rollout/collection",
                "step": i,
                "values": {"rollout/reward_mean": 0.5, "rollout/length_mean": 7.0},
            }
            file.write(json.dumps(row) + "\n")
    found = page(tmp_path)
    traces: list[dict[str, list[float]]] = found.data["length"]["traces"]  # type: ignore[assignment]
    assert len(traces[0]["x"]) <= 2000
    assert set(traces[0]["y"]) == {7.0}


def test_originals_stay_untouched_and_only_the_report_is_new(copy: Path) -> None:
    def state() -> dict[str, bytes]:
        return {
            str(p.relative_to(copy)): p.read_bytes()
            for p in copy.rglob("*")
            if p.is_file() and "reports" not in p.parts
        }

    before = state()
    write_report(copy)
    assert state() == before
    assert [p.name for p in (copy / "reports").iterdir()] == ["report.html"]


def test_the_command_prints_the_path_and_refuses_what_is_no_root(
    complete: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(complete), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "report": str(complete / "reports" / "report.html")
    }
    assert report.main([str(tmp_path / "nothing")]) == 2


def test_analysis_loads_neither_torch_nor_cuda_nor_ray(complete: Path) -> None:
    code = """
import pkgutil, sys, importlib
import runtime.analysis
for module in pkgutil.iter_modules(runtime.analysis.__path__, "runtime.analysis."):
    importlib.import_module(module.name)
from runtime.analysis.report import main
main(sys.argv[1:])
heavy = {"torch", "ray", "cuda", "pynvml", "transformers", "prefect", "wandb", "pandas"}
print(sorted(heavy & {name.split(".")[0] for name in sys.modules}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(complete)],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"
