"""What a producer tells: error series, occupancy, rows; and rewards as they are shaped."""

from dataclasses import replace

import pytest

from runtime.errors import (
    OverloadError,
)
from tests.runtime.rollout.read_off import attempt

pytestmark = pytest.mark.anyio


async def test_error_series_come_every_fifteen_seconds_and_at_the_end(world_class):
    world = world_class()
    async with world.running():
        await world.time.run_for(46)
        assert len(world.series) == 3
    assert len(world.series) == 4
    assert [round(row["errors/elapsed_seconds"]) for row in world.series] == [15, 30, 45, 46]
    assert set(world.series[0]) == {
        f"errors/{name}"
        for name in (
            "elapsed_seconds", "transport_groups", "overload_groups", "unavailable_groups",
            "timeout_groups", "completed_group_attempts", "requeued_groups",
            "window_group_attempts", "window_failed_groups", "failure_fraction_5m",
            "high_failure_seconds", "fatal",
        )
    }  # fmt: skip


async def test_occupancy_names_gate_calls_groups_engines_and_errors(world_class):
    world = world_class(engines=2)
    async with world.running() as producer:
        await world.time.run_for(0.5)
        row = producer.occupancy()
    assert row["policy"] == "e3.u0"
    assert row["http_active_calls"] == row["generation_active_calls"] == 10
    assert row["samples_in_flight"] == 20
    assert row["groups_outstanding"] == row["max_outstanding_groups"] == 10
    assert row["engine/0/active_samples"] == row["engine/1/active_samples"] == 10
    assert row["engine/1/state"] == "healthy"
    assert row["errors/fatal"] == 0


async def test_length_shaping_adds_to_the_verdict(world_class, monkeypatch):
    world = world_class()
    parts = replace(world.producer._parts, shape=lambda sample: -0.25 * len(sample.token_ids))
    monkeypatch.setattr(world.producer, "_parts", parts)
    async with world.running():
        collection = await world.take(0)
    assert [group.rewards for group in collection.groups] == [(-0.5, 0.5)] * 2


async def test_a_recording_failure_stops_nothing(world_class, monkeypatch):
    world = world_class(num_prompts=4)

    def broken(values):
        raise OSError("disk full")

    monkeypatch.setattr(world.errors, "_series", broken)
    monkeypatch.setattr(world.errors, "_row", broken)
    async with world.running():
        await world.time.run_for(20)
        assert len(await world.train(5)) == 2


async def test_failure_rows_bound_what_a_server_said(world_class, outcome_class):
    world = world_class(num_prompts=2)
    page = "<html>" + "x" * 10_000
    world.behave = lambda request: outcome_class(
        error=OverloadError(page, body=page) if attempt(request) == 1 else None
    )
    async with world.running():
        await world.train(2)
    rows = [row for row in world.rows if row["kind"] == "failure"]
    assert len(rows) == 2
    assert all(len(row["message"]) < 600 and len(row["detail"]["body"]) < 600 for row in rows)
