"""The switch that shows what a publication is at."""

from __future__ import annotations

import anyio
import pytest
import torch

from runtime.errors import ConfigError
from runtime.policy import PolicyId
from runtime.publication import diagnostics
from runtime.publication.diagnostics import SWITCH, Diagnostics, is_on, stacks_of_this_rank
from runtime.publication.disk import DiskTransport
from runtime.publication.transaction import Publisher
from tests.runtime.publication.tiny_engines import (
    Faults,
    Journal,
    TinyEngine,
    TinyTrainer,
    target,
)


@pytest.fixture
def logs(monkeypatch):
    """Rows that were logged; structlog's own capture misses loggers that were used before."""
    rows = []

    class Log:
        def info(self, event, **fields):
            rows.append({"event": event, **fields})

    monkeypatch.setattr(diagnostics, "_log", Log())
    return rows


def test_only_the_switch_turns_it_on():
    assert not is_on({})
    assert not is_on({SWITCH: "0"})
    assert is_on({SWITCH: "1"})
    with pytest.raises(ConfigError, match=SWITCH):
        is_on({SWITCH: "yes"})


@pytest.mark.parametrize("switch", [True, False])
def test_each_engines_step_is_told_with_its_address_and_its_end(tmp_path, switch, logs):
    async def main():
        journal, faults = Journal(), Faults()
        faults.plan[1, "update_from_disk"] = "refuse"
        killed = []

        async def kill(slot, incarnation, reason):
            killed.append(slot)

        publisher = Publisher(
            transport=DiskTransport(TinyTrainer(), tmp_path, Diagnostics(switch)),
            kill=kill,
            record_path=tmp_path / "publications.jsonl",
        )
        targets = [target(TinyEngine(i, journal), faults) for i in (0, 1)]
        await publisher.publish(PolicyId(1, 1), targets, mode="refresh")

    anyio.run(main)
    rows = logs
    if not switch:
        assert rows == []
        return
    assert [r["step"] for r in rows if r["event"] == "publication.step_started"] == [
        "export", "load", "load",
    ]  # fmt: skip
    (failed,) = [r for r in rows if r["event"] == "publication.step_failed"]
    assert (failed["slot"], failed["address"]) == (1, "http://tiny/1")
    assert "EngineRefused" in failed["error"]
    ends = [r for r in rows if r["event"] == "publication.step_finished"]
    assert all(r["elapsed_s"] >= 0 for r in ends)
    assert len(ends) == 2


def test_a_ranks_stacks_are_written_while_its_call_lasts(monkeypatch, logs):
    armed = []
    monkeypatch.setattr(
        diagnostics.faulthandler,
        "dump_traceback_later",
        lambda every, repeat, file: armed.append(every),
    )
    monkeypatch.setattr(
        diagnostics.faulthandler, "cancel_dump_traceback_later", lambda: armed.append("off")
    )
    with stacks_of_this_rank(0, torch.device("cpu"), "send_bucket"):
        assert armed == []
    monkeypatch.setenv(SWITCH, "1")
    with stacks_of_this_rank(0, torch.device("cpu"), "send_bucket"):
        assert armed == [60.0]
    assert armed == [60.0, "off"]
    assert [(r["event"], r["step"], r["gpu"]) for r in logs] == [
        ("publication.step_started", "bucket", "cpu"),
        ("publication.step_finished", "bucket", "cpu"),
    ]
