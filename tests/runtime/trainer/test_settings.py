from dataclasses import fields

import pytest

from configs.core import Core
from configs.lora import Lora
from configs.loss import LOSSES
from configs.rollout import Rollout
from configs.teacher import Teacher
from runtime.trainer.settings import (
    LoraSettings,
    LossSettings,
    OptimizerSettings,
    TrainerSettings,
    from_spec,
)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_the_table_reaches_the_trainer(name: str) -> None:
    settled = from_spec(
        Core.model_validate({"loss": name}), Rollout(), dtype="float32", seed=3
    ).loss
    named = LossSettings.named(name)  # type: ignore[arg-type]
    for cell in ("ratio", "normalize_std", "aggregation", "eps_clip", "eps_clip_high"):
        assert getattr(settled, cell) == getattr(named, cell)


def test_every_field_of_the_run_file_arrives() -> None:
    core = Core.model_validate(
        {
            "loss": "dapo",
            "eps_clip": 0.11,
            "eps_clip_high": 0.12,
            "dual_clip": 3.5,
            "kl": "k2",
            "kl_coef": 0.01,
            "entropy_coef": 0.02,
            "entropy_metric": True,
            "tis_clip": 4.0,
            "tis_clip_low": 0.1,
            "tis_level": "sequence",
            "tis_mode": "mask",
            "optimizer": "muon",
            "momentum": 0.7,
            "lr": 2e-5,
            "lr_schedule": "cosine",
            "lr_decay_share": 0.2,
            "lr_scale": {"*embed*": 0.5},
            "undecayed": ["*norm*"],
            "max_updates": 77,
            "min_lr": 1e-7,
            "warmup_updates": 4,
            "weight_decay": 0.1,
            "beta1": 0.8,
            "beta2": 0.98,
            "adam_eps": 1e-7,
            "max_grad_norm": 0.5,
            "updates_per_collection": 2,
            "max_tokens_per_gpu": 1000,
            "context": 2,
            "packing": "flops",
            "compile": True,
            "attention_backend": "flash_3",
            "policy_grad_norm_every": 5,
            "max_skipped_steps": 2,
            "distributed_timeout": "90s",
        }
    )
    rollout = Rollout(temperature=0.9, max_response_tokens=33)
    lora = Lora(rank=4, alpha=9.0, dropout=0.1, targets=("q_proj",))
    teacher = Teacher.model_validate({"path": "/t", "coef": 2.0, "top_k": 3})
    settings = from_spec(
        core, rollout, dtype="bfloat16", seed=11, lora=lora, teacher=teacher, deterministic=True
    )
    assert settings.lora == LoraSettings(rank=4, alpha=9.0, dropout=0.1, targets=("q_proj",))
    # What a run file cannot say keeps its default; all else must differ from it.
    fixed = {"share_prompts", "head_chunk_tokens", "threads", "reference", "joint_projections"}
    fixed.add("teacher_is_served")
    served = Teacher(url=("http://t",), coef=2.0)
    by_url = from_spec(core, rollout, dtype="float32", seed=1, teacher=served)
    assert (by_url.teacher, by_url.teacher_is_served, by_url.loss.teacher_coef) == (None, True, 2.0)
    told_apart = {
        TrainerSettings: (settings, fixed),
        OptimizerSettings: (settings.optimizer, set[str]()),
        LossSettings: (settings.loss, {"ratio", "normalize_std", "old_policy", "tis"}),
    }
    for kind, (got, same) in told_apart.items():
        for field in fields(kind):
            if field.name not in same | {"kl_reward_coef"}:
                assert getattr(got, field.name) != getattr(kind(), field.name), field.name
    assert settings.optimizer.lr_decay_updates == 77
    assert settings.max_tokens_per_bin == 2000
    assert settings.max_mean_logprob_gap == 0.05
    assert settings.distributed_timeout_s == 90.0


@pytest.mark.parametrize(
    ("asked", "kernels"),
    [("auto", "auto"), ("flash_4", "cute"), ("flash_3", "cute"), ("flash_2", "torch"),
     ("sdpa", "torch")],
)  # fmt: skip
def test_attention_backends_are_kernels(asked: str, kernels: str) -> None:
    core = Core.model_validate({"attention_backend": asked})
    assert from_spec(core, Rollout(), dtype="bfloat16", seed=0).kernels == kernels


def test_behaviour_as_old_policy_switches_tis_off() -> None:
    core = Core.model_validate({"old_policy": "behaviour"})
    loss = from_spec(core, Rollout(), dtype="float32", seed=0).loss
    assert (loss.old_policy, loss.tis) == ("behaviour", False)


def test_a_cosine_needs_an_end() -> None:
    core = Core.model_validate({"lr_schedule": "cosine"})
    with pytest.raises(ValueError, match="lr_decay_updates or max_updates"):
        from_spec(core, Rollout(), dtype="float32", seed=0)
