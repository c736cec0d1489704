"""What the rules let through, what they only warn of, and what depends on the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.load import load_run
from tests.configs.conftest import Load, Refuse
from tests.configs.rule_models import GPUS, MODEL, MOE


@pytest.mark.parametrize(
    "settings",
    [
        ("rollout.top_p = 0.9", "core.tis = false"),
        ("rollout.top_p = 0.9", "core.renormalize_support = true"),
        ("rollout.top_p = 0.9", 'core.old_policy = "behaviour"'),
        ('core.old_policy = "behaviour"',),
        ('core.loss = "reinforce"',),
        ('core.loss = "reinforce"', "core.tis = false", "async.max_staleness = 0"),
        ('core.loss = "gspo"', 'core.loss_aggregation = "sample"'),
        ('core.kl = "k3"', "core.kl_coef = 0.1"),
        ('core.kl = "k1"', "core.kl_reward_coef = 0.1", "core.reference = 'm'"),
        ("core.dual_clip = 1.1",),
        ('algorithm = "opd"', "teacher.path = 't'"),
        (
            'algorithm = "opd"',
            "teacher.url = ['http://a', 'http://b']",
            "rollout.samples_per_prompt = 1",
            "reward = {}",
        ),
        ("core.max_tokens_per_gpu = 2048",),
        ("core.max_run_seconds = '6h'",),
        (*GPUS, "core.data = 7"),
        (*GPUS, "rollout.colocated = true", "rollout.engines = 8"),
        ('core.lr_schedule = "cosine"', "core.max_updates = 10"),
        ('reward.verifier = "my.module:judge"',),
        ('launch.backend = "ray"', 'launch.weka_mounts = ["x:/"]'),
        ("core.data = 2",),
        ('core.backend = "megatron"', "launch.gpus_per_replica = 9", "core.context = 2"),
    ],
    ids=" ".join,
)
def test_allowed(load: Load, settings: tuple[str, ...]) -> None:
    load(*settings)


@pytest.mark.parametrize(
    ("config", "settings", "field", "text"),
    [
        (MODEL, ("core.tensor = 3",), "core.tensor", "8 heads"),
        (MODEL, ('core.backend = "torch"', "core.context = 4"), "core.context", "2 key/value"),
        (MODEL, ("core.pipeline = 4",), "core.pipeline", "6 layers"),
        (MODEL, ('rollout.engine = "sglang"', "rollout.tensor = 3"), "rollout.tensor", "8 heads"),
        (MOE, ("core.expert = 8",), "core.expert", "12 experts"),
        (MODEL, ("core.expert = 2",), "core.expert", "dense"),
        (MODEL, ("core.routing_replay = true",), "core.routing_replay", "dense"),
    ],
)
def test_sizes_divide_the_model(
    refuse: Refuse,
    tmp_path: Path,
    config: dict[str, int],
    settings: tuple[str, ...],
    field: str,
    text: str,
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    base = ("model = { path = 'm' }", "launch.gpus_per_replica = 96", "rollout.colocated = true")
    base += ('core.backend = "megatron"',)
    found = [p for p in refuse(*base, *settings) if p.field == field]
    assert text in str(found[0])


def test_muon_has_no_step_for_experts(load: Load, refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(MOE))
    model = "model = { path = 'm' }"
    assert [p.field for p in refuse(model, 'core.optimizer = "muon"')] == ["core.optimizer"]
    load(model, 'core.optimizer = "sgd"')


def test_replay_is_for_experts(load: Load, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(MOE))
    shape = load("model = { path = 'm' }", "core.routing_replay = true").shape
    assert shape is not None
    assert shape.is_moe


def test_a_rule_is_silent_about_fields_that_are_refused_already(refuse: Refuse) -> None:
    # kl_coef has the wrong type: whether it fits kl is not the question yet.
    fields = [p.field for p in refuse('core.kl = "k3"', 'core.kl_coef = "0.1"')]
    assert fields == ["core.kl_coef"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (("async.max_staleness = 1", "core.updates_per_collection = 2"), "in step"),
        (("core.max_updates = 5", "core.updates_per_collection = 2"), "rounds up"),
        (('launch.env = { A = "1" }', 'launch.secrets = { A = "b" }'), "the secret wins"),
        (('launch.cluster = "ai2/jupitr"',), "did you mean ai2/jupiter"),
        (('launch.backend = "ray"', 'launch.mounts = ["/"]'), "past its protection"),
        (
            ('lora.publish = "adapter"', "lora.alpha = 8.0"),
            "lora.alpha, lora.publish change nothing",
        ),
        (('evaluation.sets.a = { recipe = "laptop", samples = 2 }',), "one sample repeated"),
    ],
)
def test_warned(load: Load, settings: tuple[str, ...], text: str) -> None:
    assert any(text in warning for warning in load(*settings).warnings)


def test_protection_with_commits_and_resumption_is_no_warning(load: Load) -> None:
    loaded = load(
        'launch.backend = "ray"', 'launch.mounts = ["/"]', 'launch.auto_resume = "milepost"'
    )
    assert loaded.warnings == ()


def test_presets_break_no_rule() -> None:
    presets = sorted(Path("configs/presets").glob("*.toml"))
    assert [path.stem for path in presets] == [
        "dev",
        "laptop-lora",
        "laptop-opd",
        "laptop-sglang",
        "laptop",
        "node",
        "one-gpu",
        "three-node",
    ]
    for path in presets:
        assert load_run(path).warnings == (), path
