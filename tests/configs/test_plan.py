from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.availability import unavailable
from configs.clusters import COMPATIBILITY_PATH, find_profile, profile_names
from configs.load import load_run
from configs.loss import LOSSES
from configs.plan import NOT_CHECKED, Plan, make_plan
from configs.run import RunSpec
from configs.schedule import commit_due, evaluation_due, make_schedule
from configs.shape import LAPTOP, ModelShape
from configs.simulate import simulate_queue
from tests.configs.conftest import BASE, Load, Write

PRESETS = sorted(Path("configs/presets").glob("*.toml"))
ON_JUPITER = (
    'launch.backend = "beaker"',
    'launch.mounts = ["/"]',
    'launch.cluster = "ai2/jupiter"',
    "launch.gpus_per_replica = 8",
)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_plans_anywhere(path: Path) -> None:
    plan = make_plan(load_run(path))
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert RunSpec.model_validate(plan.spec) == load_run(path).spec
    assert plan.not_checked[-len(NOT_CHECKED) :] == NOT_CHECKED
    assert plan.topology.idle_gpus == 0


def test_presets_are_what_their_hardware_is_called() -> None:
    plans = {path.stem: make_plan(load_run(path)) for path in PRESETS}
    gpus = {name: plan.topology.total_gpus for name, plan in plans.items()}
    on_cpu = {"laptop": 0, "laptop-lora": 0, "laptop-opd": 0, "laptop-sglang": 0}
    assert gpus == on_cpu | {"one-gpu": 1, "dev": 2, "node": 8, "three-node": 24}
    protected = {name: plan.spec["launch"]["min_runtime"] for name, plan in plans.items()}
    asked = {"dev": 3600, "node": 4 * 3600, "three-node": 8 * 3600}
    assert protected == on_cpu | {"one-gpu": 0} | asked
    assert all(plan.spec["reward"]["skip_budget"] == 0.001 for plan in plans.values())


def test_the_laptop_preset_is_the_laptop_task_and_runs_here() -> None:
    plan = make_plan(load_run("configs/presets/laptop.toml"))
    assert plan.not_available == []
    assert plan.warnings == []
    assert plan.publication_transport == "disk"
    assert plan.attention == "sdpa"
    assert plan.paths["output.root"] == Path("runs/laptop").absolute()
    assert plan.batch.samples_per_collection == 256
    assert plan.schedule.evaluations[-1] == plan.schedule.updates
    core = load_run("configs/presets/laptop.toml").spec.core
    assert (core.lr, core.warmup_updates, core.beta1, core.beta2) == (5e-4, 10, 0.9, 0.99)
    assert (core.weight_decay, core.max_grad_norm, core.kl) == (0.0, 1.0, "off")
    assert core.loss_row.normalize_std
    assert core.loss_row.aggregation == "token"


def test_topology_divides_all_gpus(load: Load) -> None:
    plan = make_plan(load(*ON_JUPITER, "rollout.engines = 3"))
    assert (plan.topology.data, plan.topology.trainer_gpus, plan.topology.engine_gpus) == (5, 5, 3)
    shared = make_plan(load(*ON_JUPITER, "rollout.engines = 8", "rollout.colocated = true"))
    assert (shared.topology.data, shared.topology.engine_gpus) == (8, 8)


# --- automatic values


def test_transport_is_settled_by_a_fixed_rule(load: Load) -> None:
    assert make_plan(load()).publication_transport == "disk"
    assert make_plan(load("launch.gpus_per_replica = 2")).publication_transport == "broadcast"
    assert make_plan(load('rollout.engine = "sglang"')).publication_transport == "disk"
    on_gpus = load('rollout.engine = "sglang"', "launch.gpus_per_replica = 2")
    assert make_plan(on_gpus).publication_transport == "broadcast"
    adapter = load("launch.gpus_per_replica = 2", "lora.rank = 8", 'lora.publish = "adapter"')
    assert make_plan(adapter).publication_transport == "disk"
    chosen = make_plan(load('core.publication_transport = "broadcast"'))
    assert chosen.publication_transport == "broadcast"


def why_attention(plan: Plan) -> str:
    return next(s.reason for s in plan.settled if s.field == "core.attention_backend")


@pytest.mark.parametrize(
    ("cluster", "attention"),
    [("ai2/jupiter", "flash_3"), ("ai2/saturn", "flash_2"), ("ai2/holmes", "flash_4")],
)
def test_attention_follows_the_cluster(load: Load, cluster: str, attention: str) -> None:
    plan = make_plan(load("launch.gpus_per_replica = 8", f'launch.cluster = "{cluster}"'))
    assert plan.attention == attention
    has_kernels = attention != "flash_2"  # they are for Hopper and Blackwell
    assert ("flash-attn-4 where it is installed" in why_attention(plan)) is has_kernels


@pytest.mark.parametrize(
    ("sets", "kernels"),
    [
        (("launch.gpus_per_replica = 8",), "attention and variable-length attention"),
        (
            ("launch.gpus_per_replica = 8", 'core.attention_backend = "flash_2"'),
            "and variable-length attention",
        ),
        (("launch.gpus_per_replica = 8", 'core.attention_backend = "flash_3"'), "flash-attn-4"),
        (("launch.gpus_per_replica = 8", 'model.dtype = "float32"'), "product_attention"),
        ((), "product_attention"),
    ],
)
def test_the_plan_says_what_the_trainer_computes_attention_with(
    load: Load, sets: tuple[str, ...], kernels: str
) -> None:
    assert why_attention(make_plan(load(*sets))).endswith(kernels)


def test_attention_without_a_profile_is_left_to_the_job(load: Load) -> None:
    plan = make_plan(load("launch.gpus_per_replica = 8"))
    assert plan.attention == "auto"
    reason = why_attention(plan)
    assert all(name in reason for name in ("flash_4 on blackwell", "flash_3 on hopper"))


def test_an_older_driver_gets_the_compatibility_path(load: Load) -> None:
    assert make_plan(load(*ON_JUPITER)).environment == {"LD_LIBRARY_PATH": COMPATIBILITY_PATH}
    newer = make_plan(load(*ON_JUPITER, 'launch.cluster = "ai2/holmes"'))
    assert newer.environment == {}
    own = make_plan(load(*ON_JUPITER, 'launch.env = { LD_LIBRARY_PATH = "/mine" }'))
    assert own.environment == {}


def test_profiles_know_the_clusters() -> None:
    assert profile_names() == ["ai2/holmes", "ai2/jupiter", "ai2/saturn"]
    for name in profile_names():
        profile = find_profile(name)
        assert profile is not None
        assert profile.workspace == "ai2/open-instruct-dev"


def test_every_settled_value_has_a_reason(load: Load) -> None:
    plan = make_plan(load(*ON_JUPITER))
    assert all(settled.reason for settled in plan.settled)
    assert {"launch.workspace", "launch.priority"} <= {settled.field for settled in plan.settled}


# --- the loss table


def test_the_loss_table_row_by_row(load: Load) -> None:
    rows = {
        name: (row.ratio, row.normalize_std, row.aggregation, row.eps_clip, row.eps_clip_high)
        for name, row in LOSSES.items()
    }
    assert rows == {
        "grpo": ("token", True, "sample", 0.2, 0.2),
        "dr_grpo": ("token", False, "constant", 0.2, 0.2),
        "dapo": ("token", True, "token", 0.2, 0.28),
        "gspo": ("sequence", True, "sample", 3e-4, 4e-4),
        "reinforce": ("none", False, "token", None, None),
    }
    for name in LOSSES:
        assert load(f'core.loss = "{name}"').spec.core.loss_row == LOSSES[name]


def test_cells_win_over_their_row(load: Load) -> None:
    row = load('core.loss = "dapo"', "core.eps_clip = 0.1", "core.normalize_std = false").spec
    assert (row.core.loss_row.eps_clip, row.core.loss_row.eps_clip_high) == (0.1, 0.1)
    assert not row.core.loss_row.normalize_std
    both = load('core.loss = "dapo"', "core.eps_clip = 0.1", "core.eps_clip_high = 0.3").spec
    assert both.core.loss_row.eps_clip_high == 0.3


def test_tis_is_on_unless_the_ratio_holds_it(load: Load) -> None:
    assert load().spec.core.uses_tis
    assert not load('core.old_policy = "behaviour"').spec.core.uses_tis
    assert not load("core.tis = false").spec.core.uses_tis


def test_the_gap_limit_follows_the_precision(load: Load) -> None:
    core = load().spec.core
    assert (core.mean_logprob_gap("bfloat16"), core.mean_logprob_gap("float32")) == (0.05, 1e-4)
    assert load("core.max_mean_logprob_gap = 0.2").spec.core.mean_logprob_gap("float32") == 0.2


# --- boundaries


@given(st.integers(1, 7), st.integers(1, 60), st.integers(1, 20), st.none() | st.integers(1, 20))
def test_cadences_round_up_to_boundaries(
    per_collection: int, max_updates: int, every: int, evaluate: int | None
) -> None:
    sets = {"a": {"recipe": "laptop"}} if evaluate else {}
    spec = RunSpec.model_validate(
        {
            "name": "x",
            "output": {"root": "/x"},
            "rollout": {"groups_per_collection": 420},
            "core": {"max_updates": max_updates, "updates_per_collection": per_collection},
            "checkpoint": {"every_updates": every},
            "evaluation": {"every_updates": evaluate, "sets": sets},
        }
    )
    schedule = make_schedule(spec)
    last = schedule.updates
    assert last is not None
    assert max_updates <= last < max_updates + per_collection
    boundaries = range(per_collection, last + 1, per_collection)
    # The session asks boundary by boundary; the plan lists them: both must agree.
    assert schedule.commits == [0, *(u for u in boundaries if commit_due(spec, u))]
    due = [u for u in boundaries if evaluation_due(spec, u) or (sets and u == last)]
    assert schedule.evaluations == due
    # Every multiple of the cadence is served at the first boundary at or after it.
    for multiple in range(every, last + 1, every):
        assert -(-multiple // per_collection) * per_collection in schedule.commits
    assert set(schedule.evaluations) <= set(schedule.commits)


def test_a_timeout_without_room_to_close_warns_with_the_sum(load: Load) -> None:
    tight = make_plan(load("core.max_run_seconds = 3600", 'launch.timeout = "1h"'))
    (warning,) = tight.warnings
    assert "3600 + collection 1800 + commit 600 + teardown 120 = 6120 s" in warning
    assert make_plan(load("core.max_run_seconds = 3600", "launch.timeout = 6120")).warnings == []
    assert make_plan(load("core.max_run_seconds = 3600")).warnings == []


# --- memory


def test_parameters_of_the_laptop_model_by_hand() -> None:
    attention = 96 * 96 + 2 * 96 * 32 + 96 * 96 + 2 * 32
    layer = attention + 3 * 96 * 256 + 2 * 96
    assert LAPTOP.num_parameters == 261 * 96 + 3 * layer + 96


def test_a_qwen3_shape_is_counted_right(load: Load, tmp_path: Path) -> None:
    config = {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
    assert ModelShape.from_config(config).num_parameters == 596_049_920
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    plan = make_plan(load("model = { path = 'm' }", *ON_JUPITER, "rollout.engines = 4"))
    assert plan.memory is not None
    assert plan.memory.master_bytes == 4 * 596_049_920
    assert plan.memory.moments_bytes == 8 * 596_049_920
    for more, values in (
        ('core.optimizer = "sgd"', 596_049_920),
        ('core.optimizer = "muon"', 596_049_920 + 151_936 * 1024),
    ):
        memory = make_plan(load("model = { path = 'm' }", *ON_JUPITER, more)).memory
        assert memory is not None
        assert memory.moments_bytes == 4 * values
    assert plan.memory.trainer_bytes_per_rank == (4 + 12) * 596_049_920 // 4
    assert plan.memory.kv_bytes_per_token == 2 * 28 * 8 * 128 * 2
    assert plan.memory.activation_bytes_per_rank < 8 << 30, "layers are recomputed by default"


def test_the_estimate_is_the_peak_that_was_measured(load: Load, tmp_path: Path) -> None:
    """31.8 GiB on one H200 (docs/performance.md): 16384 tokens, layers compiled, one rank."""
    config = {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "vocab_size": 151936, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    settings = ("launch.gpus_per_replica = 2", "rollout.engines = 1", "model.dtype = 'bfloat16'")
    whole = ("core.activation_checkpointing = false", "core.max_tokens_per_gpu = 16384")
    memory = make_plan(load("model = { path = 'm' }", *settings, *whole)).memory
    assert memory is not None
    estimate = (memory.trainer_bytes_per_rank + memory.activation_bytes_per_rank) / 2**30
    assert estimate == pytest.approx(31.8, rel=0.05)
    # The same row on two ranks: half of it each, and what the exchange adds.
    settings = ("launch.gpus_per_replica = 3", *settings[1:], "core.context = 2")
    half = (*whole[:1], "core.max_tokens_per_gpu = 8192")
    shared = make_plan(load("model = { path = 'm' }", *settings, *half))
    assert shared.topology.trainer_ranks == 2
    assert shared.memory is not None
    share = shared.memory.activation_bytes_per_rank / memory.activation_bytes_per_rank
    assert 0.5 < share < 0.6


@pytest.mark.parametrize("text", ["", "[]", "{", '{"hidden_size": "x"}', '{"vocab_size": 3}'])
def test_an_unknown_config_is_said_not_guessed(load: Load, tmp_path: Path, text: str) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(text)
    plan = make_plan(load("model = { path = 'm' }"))
    assert plan.memory is None
    assert "model shape" in plan.not_checked[0]


def test_state_larger_than_the_gpu_warns(load: Load, tmp_path: Path) -> None:
    config = {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 128256,
    }
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    warnings = make_plan(load("model = { path = 'm' }", *ON_JUPITER)).warnings
    assert [w for w in warnings if w.startswith("memory: the trainer")]
    assert [w for w in warnings if w.startswith("memory: the engine")]


def test_a_file_sized_for_another_gpu_warns(load: Load) -> None:
    other = make_plan(load(*ON_JUPITER, "launch.gpu_memory = '141 GiB'"))
    assert any("sized for GPUs of 141.0 GiB" in warning for warning in other.warnings)
    same = make_plan(load(*ON_JUPITER, "launch.gpu_memory = '80 GiB'"))
    assert not any("sized for" in warning for warning in same.warnings)


# --- what this version cannot run yet


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (("core.renormalize_support = true",), "core.renormalize_support"),
        (('rollout.function = "a.b:c"',), "rollout.function"),
        (("checkpoint.every_seconds = 60",), "checkpoint.every_seconds"),
        (('reward.code.url = "http://x"',), "reward.code"),
        (("reward.judge = { url = 'http://x' }",), "reward.judge"),
    ],
)
def test_missing_machinery_is_listed_and_still_plans(
    load: Load, settings: tuple[str, ...], field: str
) -> None:
    loaded = load(*settings)
    lines = unavailable(loaded.spec)
    assert [line for line in lines if line.startswith(f"not available yet: {field} = ")]
    assert make_plan(loaded).not_available == lines


@pytest.mark.parametrize(
    "setting",
    [
        'core.loss = "dr_grpo"',
        'core.loss = "dapo"',
        'core.loss = "gspo"',
        'core.loss = "reinforce"',
        "core.entropy_coef = 0.01",
        "lora.rank = 8",
        "rollout.engines = 3",
        "core.data = 2",
        'core.publication_mode = "drain"',
        'core.publication_transport = "broadcast"',
        'core.publication_transport = "ipc"',
        'core.publication_mode = "rolling"',
        'core.refresh_pause = "retract"',
        "launch.gpus_per_replica = 2",
        'evaluation.sets.a = { recipe = "laptop" }',
        'tracking.mode = "disabled"',
        'reward.verifier = "my.module:verify"',
        'rollout.filter = "equal_rewards"',
    ],
)
def test_what_is_built_is_not_listed(load: Load, setting: str) -> None:
    assert unavailable(load(setting).spec) == []


# --- simulation


def test_simulation_keeps_the_staleness_limit_and_repeats(load: Load) -> None:
    spec = load("async.max_staleness = 2").spec
    simulation = simulate_queue(spec)
    assert simulation == simulate_queue(spec)
    assert all(row.max_staleness <= 2 for row in simulation.rows)
    waits = [row.trainer_wait_share for row in simulation.rows]
    assert waits == sorted(waits)


def test_simulation_in_step_has_no_staleness(load: Load) -> None:
    rows = simulate_queue(load("async.max_staleness = 0").spec).rows
    assert {row.max_staleness for row in rows} == {0}


def test_a_plan_needs_no_file_but_its_own(write: Write) -> None:
    path = write(BASE)
    assert list(path.parent.iterdir()) == [path]
    make_plan(load_run(path))
    assert list(path.parent.iterdir()) == [path]
