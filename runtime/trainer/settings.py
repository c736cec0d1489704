"""Everything the trainer is told, settled: no field here has a default that depends on another.

The run file's models live in ``configs``; ``from_spec`` is the one place that turns them into
these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from configs.core import AttentionBackend, Core, OptimizerName
from configs.lora import Lora
from configs.loss import LOSSES, Aggregation, LossName, Ratio
from configs.rollout import Rollout
from configs.teacher import Teacher

KlKind = Literal["off", "k1", "k2", "k3"]
DTypeName = Literal["float32", "bfloat16"]
KernelChoice = Literal["auto", "torch", "cute"]


_KERNELS: dict[AttentionBackend, KernelChoice] = {
    "auto": "auto",
    "flash_4": "cute",
    "flash_3": "cute",
    "flash_2": "torch",
    "sdpa": "torch",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The loss of one token, how tokens add up, and the corrections around it."""

    ratio: Ratio = "token"
    normalize_std: bool = True
    """Scale centred rewards by the group's std; applied where advantages are made."""
    aggregation: Aggregation = "sample"
    eps_clip: float = 0.2
    """Not read when ``ratio`` is "none"."""
    eps_clip_high: float = 0.2
    dual_clip: float | None = None
    kl: KlKind = "off"
    kl_coef: float = 0.0
    """KL as a term of the loss."""
    kl_reward_coef: float = 0.0
    """KL subtracted from the advantage, token by token; not together with ``kl_coef``."""
    entropy_coef: float = 0.0
    entropy_metric: bool = False
    """Report the entropy although ``entropy_coef`` is 0."""
    old_policy: Literal["recompute", "behaviour"] = "recompute"
    tis: bool = True
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    tis_level: Literal["token", "sequence"] = "token"
    tis_mode: Literal["truncate", "mask"] = "truncate"
    max_response_tokens: int = 1024
    """Divisor of the "constant" aggregation."""
    teacher_coef: float = 0.0
    """Weight of the teacher (OPD); 0: there is none."""
    teacher_top_k: int = 0
    """0: the teacher counts in the advantage; K: as a loss over its K likeliest tokens and a rest.
    """

    @classmethod
    def named(cls, name: LossName, **cells: Any) -> LossSettings:
        """The row ``name`` of the loss table, with single cells replaced."""
        row = LOSSES[name]
        settings = cls(
            ratio=row.ratio,
            normalize_std=row.normalize_std,
            aggregation=row.aggregation,
            eps_clip=0.0 if row.eps_clip is None else row.eps_clip,
            eps_clip_high=0.0 if row.eps_clip_high is None else row.eps_clip_high,
        )
        return replace(settings, **cells)

    @property
    def has_other_terms(self) -> bool:
        """The loss holds more than the policy term, so its gradient is not the policy gradient."""
        has_kl = self.kl != "off" and self.kl_coef != 0
        return has_kl or self.entropy_coef != 0 or self.has_teacher_loss

    @property
    def uses_reference(self) -> bool:
        """A reference policy is scored."""
        return self.kl != "off" and (self.kl_coef != 0 or self.kl_reward_coef != 0)

    @property
    def has_teacher_loss(self) -> bool:
        """The teacher is a term of the loss."""
        return self.teacher_coef != 0 and self.teacher_top_k > 0

    @property
    def has_teacher_advantage(self) -> bool:
        """The teacher is part of the advantage."""
        return self.teacher_coef != 0 and self.teacher_top_k == 0

    @property
    def has_token_advantage(self) -> bool:
        """KL or a teacher adds to the advantage, so groups with equal rewards have a gradient."""
        return (self.kl != "off" and self.kl_reward_coef != 0) or self.has_teacher_advantage

    @property
    def needs_entropy(self) -> bool:
        """Entropy is computed: as a term, or as a figure only."""
        return self.entropy_coef != 0 or self.entropy_metric


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Adapters instead of full weights."""

    rank: int
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = Lora().targets
    also: tuple[str, ...] = ()
    """Patterns of names of weights that train whole beside them."""

    def trains_whole(self, name: str) -> bool:
        """The weight of this name is one of those."""
        return any(fnmatchcase(name, pattern) for pattern in self.also)

    @property
    def scale(self) -> float:
        """What an adapter's product is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """What makes steps of gradients, and the course of its learning rate."""

    kind: OptimizerName = "adamw"
    momentum: float = 0.9
    """Of "sgd" and "muon"."""
    lr: float = 1e-6
    lr_schedule: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    lr_decay_updates: int | None = None
    """Update at which the rate arrives at ``min_lr``; None only with "constant"."""
    lr_decay_share: float = 0.1
    """Last part of the way to there in which "wsd" falls."""
    lr_scale: tuple[tuple[str, float], ...] = ()
    """Factors of the rate by pattern of the weight's name; the first that fits counts."""
    undecayed: tuple[str, ...] = ()
    """Patterns of names without weight decay."""
    min_lr: float = 0.0
    warmup_updates: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    adam_eps: float = 1e-8
    max_grad_norm: float = 1.0

    def group_of(self, name: str) -> tuple[float, float]:
        """(factor of the learning rate, weight decay) of the weight ``name``."""
        scale = next((f for pattern, f in self.lr_scale if fnmatchcase(name, pattern)), 1.0)
        is_undecayed = any(fnmatchcase(name, pattern) for pattern in self.undecayed)
        return scale, 0.0 if is_undecayed else self.weight_decay


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """One trainer, all ranks alike."""

    loss: LossSettings = LossSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    dtype: DTypeName = "float32"
    """Of the forward pass and of exported weights; the optimizer always keeps fp32 masters."""
    temperature: float = 1.0
    """Log-probs are scored at the temperature the tokens were sampled at."""
    max_tokens_per_bin: int = 16384
    """Tokens of a packed row, over all ranks that share it."""
    context: int = 1
    """Neighbouring ranks that share each packed row."""
    packing: Literal["tokens", "flops"] = "tokens"
    updates_per_collection: int = 1
    """Optimizer steps made from one collection."""
    share_prompts: bool = True
    """Run a prompt once per group and bin instead of once per sample; same result."""
    activation_checkpointing: bool = False
    compile: bool = False
    joint_projections: bool | None = None
    """q, k, v as one product, gate and up as another; None: on a GPU, where it pays."""
    kernels: KernelChoice = "auto"
    """Of attention and large products: torch's own, or those of flash-attn-4 and quack-kernels
    ("cute"), which "auto" takes where they can be had."""
    head_chunk_tokens: int = 4096
    """Rows of logits that exist at one time."""
    max_mean_logprob_gap: float = 1e-4
    """Limit of the policy_agreement contract: a mean."""
    policy_grad_norm_every: int = 50
    max_skipped_steps: int = 0
    reference: str | None = None
    """Model folder of the reference policy; None: the initial model. Loaded only if KL is on. With
    adapters and None: the base, which is held anyway."""
    teacher: str | None = None
    """Model folder of the teacher; loaded only if ``loss.teacher_coef`` is not 0."""
    teacher_is_served: bool = False
    """The teacher's log-probs come with the sequences instead; not together with ``teacher``."""
    lora: LoraSettings | None = None
    """None: all weights train."""
    distributed_timeout_s: float = 600.0
    seed: int = 0
    deterministic: bool = False
    """Refuse kernels whose result depends on scheduling."""
    threads: int = 1
    """Torch threads per process; more than the free cores collapses."""


def from_spec(
    core: Core,
    rollout: Rollout,
    *,
    dtype: DTypeName,
    seed: int,
    lora: Lora | None = None,
    teacher: Teacher | None = None,
    deterministic: bool = False,
) -> TrainerSettings:
    """Settle the trainer of a run file.

    Args:
        core: ``[core]``.
        rollout: ``[rollout]``; temperature and the longest response are read from it.
        dtype: ``[model] dtype``.
        seed: of the run.
        lora: ``[lora]``; None, or rank 0: all weights train.
        teacher: ``[teacher]``, held by the trainer or served; None: no distillation.
        deterministic: same seed, same loss, also on a GPU; costs speed there.

    Raises:
        ValueError: for what ``configs.availability`` should have refused before.
    """
    if core.backend != "torch" or core.packing == "expert_aware":
        raise ValueError(f"backend {core.backend} with packing {core.packing} is not for torch")
    return TrainerSettings(
        loss=_loss(core, rollout, teacher),
        optimizer=_optimizer(core),
        dtype=dtype,
        temperature=rollout.temperature,
        max_tokens_per_bin=core.max_tokens_per_gpu * core.context,
        context=core.context,
        packing=core.packing,
        updates_per_collection=core.updates_per_collection,
        activation_checkpointing=core.activation_checkpointing,
        compile=core.compile,
        kernels=_KERNELS[core.attention_backend],
        max_mean_logprob_gap=core.mean_logprob_gap(dtype),
        policy_grad_norm_every=core.policy_grad_norm_every,
        max_skipped_steps=core.max_skipped_steps,
        reference=None if core.reference is None else str(core.reference),
        teacher=None if teacher is None or teacher.path is None else str(teacher.path),
        teacher_is_served=teacher is not None and bool(teacher.url),
        lora=None if lora is None or lora.rank == 0 else _lora(lora),
        distributed_timeout_s=core.distributed_timeout,
        seed=seed,
        deterministic=deterministic,
    )


def _lora(lora: Lora) -> LoraSettings:
    return LoraSettings(
        rank=lora.rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
        targets=lora.targets,
        also=lora.also,
    )


def _loss(core: Core, rollout: Rollout, teacher: Teacher | None) -> LossSettings:
    row = core.loss_row
    return LossSettings(
        ratio=row.ratio,
        normalize_std=row.normalize_std,
        aggregation=row.aggregation,
        eps_clip=row.eps_clip or 0.0,
        eps_clip_high=row.eps_clip_high or 0.0,
        dual_clip=core.dual_clip,
        kl=core.kl,
        kl_coef=core.kl_coef,
        kl_reward_coef=core.kl_reward_coef,
        entropy_coef=core.entropy_coef,
        entropy_metric=core.entropy_metric,
        old_policy=core.old_policy,
        tis=core.uses_tis,
        tis_clip=core.tis_clip,
        tis_clip_low=core.tis_clip_low,
        tis_level=core.tis_level,
        tis_mode=core.tis_mode,
        max_response_tokens=rollout.max_response_tokens,
        teacher_coef=0.0 if teacher is None else teacher.coef,
        teacher_top_k=0 if teacher is None else teacher.top_k,
    )


def _optimizer(core: Core) -> OptimizerSettings:
    decay = core.lr_decay_updates or core.max_updates
    if core.lr_schedule != "constant" and decay is None:
        raise ValueError(f"{core.lr_schedule} needs lr_decay_updates or max_updates")
    return OptimizerSettings(
        kind=core.optimizer,
        momentum=core.settled_momentum,
        lr=core.lr,
        lr_schedule=core.lr_schedule,
        lr_decay_updates=decay,
        lr_decay_share=core.lr_decay_share,
        lr_scale=tuple(core.lr_scale.items()),
        undecayed=core.undecayed,
        min_lr=core.min_lr,
        warmup_updates=core.warmup_updates,
        weight_decay=core.weight_decay,
        beta1=core.beta1,
        beta2=core.beta2,
        adam_eps=core.adam_eps,
        max_grad_norm=core.max_grad_norm,
    )
