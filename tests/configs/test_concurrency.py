from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from configs.concurrency import settle_concurrency
from configs.core import Core
from configs.output import Output
from configs.rollout import Async, Rollout
from configs.run import RunSpec
from tests.configs.conftest import Load


@st.composite
def specs(draw: st.DrawFn, *, explicit: bool = False) -> RunSpec:
    updates = draw(st.integers(1, 4))
    samples = draw(st.integers(1, 16))
    return RunSpec(
        name="x",
        output=Output.model_validate({"root": "/x"}),
        core=Core(updates_per_collection=updates),
        rollout=Rollout(
            groups_per_collection=updates * draw(st.integers(1, 64)),
            samples_per_prompt=samples,
            engines=draw(st.integers(1, 8)),
            max_running_requests=draw(st.integers(1, 512)),
        ),
        async_=Async(
            max_staleness=draw(st.integers(0, 9)),
            async_max_concurrent_samples=draw(st.integers(samples, 5000)) if explicit else None,
        ),
    )


@given(specs())
def test_automatic_concurrency_is_whole_groups_within_the_bound(spec: RunSpec) -> None:
    settled = settle_concurrency(spec)
    per_group = spec.rollout.samples_per_prompt
    collection = spec.rollout.groups_per_collection * per_group
    slots = spec.rollout.engines * spec.rollout.max_running_requests
    assert settled.samples % per_group == 0
    assert settled.samples <= settled.bound_groups * per_group
    if settled.samples < settled.bound_groups * per_group:
        assert settled.samples >= max(collection, 2 * slots)
        assert settled.samples < max(collection, 2 * slots) + per_group
    # The bound holds a whole collection, so the trainer can always be fed.
    assert settled.samples >= collection


@given(specs() | specs(explicit=True))
def test_expected_staleness_keeps_the_limit(spec: RunSpec) -> None:
    settled = settle_concurrency(spec)
    assert 0 <= settled.staleness_generating <= settled.staleness_training
    assert settled.staleness_training <= spec.async_.max_staleness


@given(specs(explicit=True))
def test_an_explicit_number_is_cut_to_whole_groups_within_the_bound(spec: RunSpec) -> None:
    wanted = spec.async_.async_max_concurrent_samples
    assert wanted is not None
    settled = settle_concurrency(spec)
    bound = settled.bound_groups * spec.rollout.samples_per_prompt
    assert settled.samples == min(wanted - wanted % spec.rollout.samples_per_prompt, bound)
    assert bool(settled.warnings) == (wanted > settled.automatic or settled.samples < wanted)


def test_the_arithmetic_by_hand(load: Load) -> None:
    # 32 groups x 8; 1 engine of 100 slots: 2 x 100 = 200 < 256.
    assert settle_concurrency(load("rollout.max_running_requests = 100").spec).samples == 256
    # 2 x 300 = 600 = 75 groups of 8.
    assert settle_concurrency(load("rollout.max_running_requests = 300").spec).samples == 600
    # 2 x 301 = 602 -> 76 groups.
    assert settle_concurrency(load("rollout.max_running_requests = 301").spec).samples == 608
    # In step: one collection at most.
    in_step = load("rollout.max_running_requests = 300", "async.max_staleness = 0").spec
    assert settle_concurrency(in_step).samples == 256
    assert settle_concurrency(in_step).staleness_training == 0


def test_too_much_queued_work_names_what_to_look_at(load: Load) -> None:
    (warning,) = settle_concurrency(load("async.async_max_concurrent_samples = 800").spec).warnings
    assert "trainer wait and serving occupancy" in warning


@given(specs(), st.integers(1, 512))
def test_fewer_slots_than_asked_for_never_mean_more_samples(spec: RunSpec, slots: int) -> None:
    asked = spec.rollout.engines * spec.rollout.max_running_requests
    fewer = settle_concurrency(spec, slots=min(slots, asked))
    assert fewer.samples <= settle_concurrency(spec).samples
    assert fewer.samples >= spec.rollout.groups_per_collection * spec.rollout.samples_per_prompt
    assert settle_concurrency(spec, slots=asked) == settle_concurrency(spec)
