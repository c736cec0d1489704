from __future__ import annotations

import itertools

import pytest

from configs.digest import (
    LAYOUT,
    NEITHER,
    TRAINING,
    WHOLE,
    layout,
    layout_differences,
    training_differences,
    training_digest,
)
from configs.load import load_run
from configs.run import RunSpec
from configs.section import Section, nested_section
from tests.configs.conftest import Load


def fields_of(section: type[Section]) -> dict[str, set[str]]:
    """Section ("" is the top) -> field names, as the tables of the digests name them."""
    found: dict[str, set[str]] = {"": set()}
    for name, info in section.model_fields.items():
        nested = nested_section(info.annotation)
        if nested is None:
            found[""].add(name)
        else:
            found[info.alias or name] = {f.alias or n for n, f in nested.model_fields.items()}
    return found


def test_every_field_is_in_exactly_one_table() -> None:
    known = fields_of(RunSpec)
    counted: dict[str, list[str]] = {section: [] for section in known}
    for section, names in itertools.chain(TRAINING.items(), LAYOUT.items(), NEITHER.items()):
        counted[section] += known[section] if names == WHOLE else names
    for section, names in known.items():
        assert sorted(counted[section]) == sorted(names), section


@pytest.mark.parametrize(
    "setting",
    [
        "core.max_updates = 999",
        "data.epochs = 7",
        "checkpoint.every_updates = 3",
        "checkpoint.keep = 9",
        'evaluation.sets.a = { recipe = "laptop" }',
        'tracking.mode = "disabled"',
        'output.root = "/elsewhere"',
        'name = "other"',
        'launch.priority = "high"',
        'launch.timeout = "4h"',
        "rollout.engines = 2",
        "core.data = 2",
        "core.max_tokens_per_gpu = 4096",
        "health.enabled = false",
        "async.async_max_concurrent_samples = 64",
        # Written out with the value it has anyway.
        "core.tis = true",
        "core.eps_clip = 0.2",
        'core.loss_aggregation = "sample"',
        'core.optimizer = "adamw"',
    ],
)
def test_may_change_on_resume(load: Load, setting: str) -> None:
    a, b = load().spec, load(setting).spec
    assert training_digest(a) == training_digest(b)
    assert training_differences(a, b) == []


@pytest.mark.parametrize(
    ("setting", "fields"),
    [
        ("core.lr = 1e-3", ["core.lr"]),
        ("seed = 2", ["seed"]),
        ("rollout.samples_per_prompt = 4", ["rollout.samples_per_prompt"]),
        ("async.max_staleness = 0", ["async.max_staleness"]),
        ('model.dtype = "float32"', ["model.dtype"]),
        ("data.shuffle = false", ["data.shuffle"]),
        ('reward.verifier = "math"', ["reward.verifier"]),
        (
            'core.loss = "dr_grpo"',
            ["core.loss", "core.loss_aggregation", "core.normalize_std"],
        ),
        ("core.tis = false", ["core.tis"]),
        ("lora.rank = 4", ["lora.rank"]),
    ],
)
def test_must_match_on_resume_and_is_named(load: Load, setting: str, fields: list[str]) -> None:
    a, b = load().spec, load(setting).spec
    assert training_digest(a) != training_digest(b)
    assert training_differences(a, b) == training_differences(b, a) == fields


def test_momentum_counts_as_settled(load: Load) -> None:
    sgd = 'core.optimizer = "sgd"'
    a, b = load(sgd).spec, load(sgd, "core.momentum = 0.9").spec
    assert training_differences(a, b) == []
    assert training_differences(a, load().spec) == ["core.momentum", "core.optimizer"]


def test_the_digest_of_a_run_that_stands_is_not_changed_by_new_fields() -> None:
    # A field that is new counts only where it is used; otherwise no run of before could go on.
    spec = load_run("configs/presets/laptop.toml").spec
    assert training_digest(spec).startswith("e6aea7ac97f6")


def test_layout_is_apart(load: Load) -> None:
    a, b = load().spec, load("rollout.engines = 2", "core.data = 2").spec
    assert layout(a) != layout(b)
    assert layout_differences(a, b) == ["core.data", "rollout.engines"]
    assert layout(a) == layout(load("core.lr = 1.0").spec)


def test_digest_survives_the_journey_through_json(load: Load) -> None:
    spec = load("core.lr = 1").spec
    assert training_digest(RunSpec.model_validate(spec.model_dump(mode="json"))) == training_digest(
        spec
    )
