"""What every sink promises, tried on all of them."""

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from runtime.clock import ManualClock
from runtime.telemetry.contracts import ContractLog
from runtime.telemetry.events import Event
from runtime.telemetry.lifecycle import LifecycleLog
from runtime.telemetry.recorder import Recorder
from runtime.telemetry.rows import Owner, RowWriter
from runtime.telemetry.sinks import (
    Axis,
    LocalSink,
    MultiSink,
    TrackingSink,
    WandbSettings,
    WandbSink,
)
from runtime.telemetry.timing import Stage
from runtime.telemetry.wandb_sink import resolve_mode

OWNER = Owner(attempt=1, epoch=1)


class Broken:
    """A sink that breaks its promise; counts how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def log(self, axis: Axis, step: float, values: Mapping[str, float | None]) -> None:
        self.calls += 1
        raise OSError("broken")

    def finish(self) -> None:
        self.calls += 1
        raise OSError("broken")


def local(root: Path) -> LocalSink:
    return LocalSink(RowWriter(root / "metrics.jsonl", OWNER, clock=ManualClock()))


def local_on_full_disk(root: Path) -> LocalSink:
    (root / "full.jsonl").symlink_to("/dev/full")
    return LocalSink(RowWriter(root / "full.jsonl", OWNER, clock=ManualClock()))


def disabled(root: Path) -> WandbSink:
    sink = WandbSink(root, WandbSettings(mode="disabled", project="p", name="n"), OWNER)
    sink.start()
    return sink


def never_started(root: Path) -> WandbSink:
    settings = WandbSettings(mode="offline", project="p", name="n", max_queued_rows=2)
    return WandbSink(root, settings, OWNER)


def several(root: Path) -> MultiSink:
    return MultiSink([local(root), Broken(), local_on_full_disk(root)])


@pytest.mark.parametrize("make", [local, local_on_full_disk, disabled, never_started, several])
def test_no_sink_raises_or_blocks_from_any_thread(
    make: Callable[[Path], TrackingSink], tmp_path: Path
) -> None:
    sink = make(tmp_path)
    raised: list[BaseException] = []

    def work() -> None:
        try:
            for i in range(20):
                sink.log(Axis.TRAIN, i, {"train/loss": float("nan"), "train/x": None})
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    sink.finish()
    sink.finish()
    assert not raised


def test_the_local_sink_keeps_every_row_with_its_axis(tmp_path: Path) -> None:
    sink = local(tmp_path)
    sink.log(Axis.TRAIN, 3, {"train/loss": 0.5, "train/policy_grad_norm": None})
    sink.log(Axis.ERRORS, 15.0, {"errors/fatal": 0.0})
    sink.finish()
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["axis"], first["step"]) == ("train/update", 3)
    assert first["values"] == {"train/loss": 0.5, "train/policy_grad_norm": None}
    assert (second["axis"], second["step"]) == ("errors/elapsed_seconds", 15.0)


def test_a_sink_that_raises_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    broken, good = Broken(), local(tmp_path)
    sink = MultiSink([broken, good])
    for i in range(3):
        sink.log(Axis.TRAIN, i, {"train/loss": 1.0})
    sink.finish()
    assert broken.calls == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_the_groups_of_all_axes_cover_every_key_once() -> None:
    groups = [group for axis in Axis for group in axis.groups]
    assert len(groups) == len(set(groups))
    assert {"train/*", "rollout/*", "errors/*", "evaluation/*", "contracts/*"} <= set(groups)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": ""}, "offline"),
        ({"WANDB_API_KEY": "x" * 40}, "online"),
        ({"WANDB_IDENTITY_TOKEN_FILE": "/f"}, "online"),
    ],
)
def test_online_needs_a_key(env: dict[str, str], expected: str) -> None:
    assert resolve_mode("online", env) == expected
    assert resolve_mode("offline", env) == "offline"


def test_a_netrc_entry_for_the_right_host_is_a_key(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password k\n")
    (tmp_path / ".netrc").chmod(0o600)
    env = {"HOME": str(tmp_path)}
    assert resolve_mode("online", env) == "online"
    assert resolve_mode("online", env | {"WANDB_BASE_URL": "https://other.example"}) == "offline"
    (tmp_path / ".netrc").write_text("machine ((( nonsense")
    assert resolve_mode("online", env) == "offline"


def test_the_recorder_writes_each_file_of_the_output_root(tmp_path: Path) -> None:
    clock = ManualClock()
    recorder = Recorder(tmp_path, OWNER, clock=clock).start()
    recorder.metrics.log(Axis.TRAIN, 1, {"train/loss": 1.0})
    recorder.timing.record(Stage.TRAIN, start=1.0, duration_s=1.0)
    recorder.lifecycle.record(Event.GENERATION_PAUSED, update=1)
    recorder.contracts.write("optimizer", update=1, holds=None, values={"policy_loss": 0.0})
    assert recorder.sampler(lambda: {"x": 1}).tick()
    recorder.open_rows(tmp_path / "rollout_errors.jsonl").append({"kind": "failure"})
    recorder.close()
    recorder.close()
    names = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.jsonl")}
    assert names == {
        "metrics.jsonl",
        "driver_timing.jsonl",
        "pipeline_lifecycle.jsonl",
        "pipeline_occupancy.jsonl",
        "contracts/optimizer.jsonl",
        "rollout_errors.jsonl",
    }


def test_a_violated_contract_is_on_disk_before_anything_else_happens(tmp_path: Path) -> None:
    contracts = ContractLog(
        tmp_path / "contracts", lambda path: RowWriter(path, OWNER, clock=ManualClock())
    )
    contracts.write("policy_agreement", update=4, holds=True, values={"gap_mean": 0.01})
    contracts.write("policy_agreement", update=5, holds=False, values={"gap_mean": 0.9})
    rows = (tmp_path / "contracts" / "policy_agreement.jsonl").read_text().splitlines()
    assert [json.loads(row)["holds"] for row in rows] == [True, False]
    with pytest.raises(ValueError, match="not a contract name"):
        contracts.write("../x", update=1, holds=True, values={})


def test_the_numbers_of_contracts_reach_the_tracking_sink_too(tmp_path: Path) -> None:
    sink = local(tmp_path)
    contracts = ContractLog(
        tmp_path / "contracts",
        lambda path: RowWriter(path, OWNER, clock=ManualClock()),
        sink=sink,
    )
    contracts.write(
        "optimizer", update=3, holds=True, values={"policy_loss": 0.0, "norm": None, "word": "x"}
    )
    sink.finish()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (row["axis"], row["step"]) == ("train/update", 3)
    assert row["values"] == {
        "contracts/optimizer/policy_loss": 0.0,
        "contracts/optimizer/holds": 1.0,
    }


def test_lifecycle_rows_keep_event_and_update(tmp_path: Path) -> None:
    rows = RowWriter(tmp_path / "l.jsonl", OWNER, clock=ManualClock())
    LifecycleLog(rows).record(Event.ENGINE_DIED, slot=1, update=None)
    rows.close()
    row = json.loads((tmp_path / "l.jsonl").read_text())
    assert (row["event"], row["slot"], row["update"]) == ("engine.died", 1, None)
