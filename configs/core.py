"""`[core]`: the trainer. Layout, loss, optimizer, publication and the bounds of the run."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from configs.loss import LOSSES, Aggregation, LossName, LossRow
from configs.model import DType
from configs.section import PositiveSeconds, RunPath, Seconds, Section, Texts

AttentionBackend = Literal["auto", "flash_4", "flash_3", "flash_2", "sdpa"]
PublicationMode = Literal["refresh", "drain", "rolling"]
OptimizerName = Literal["adamw", "sgd", "muon"]
RefreshPause = Literal["in_place", "retract", "abort"]
PublicationTransport = Literal["auto", "disk", "ipc", "broadcast", "p2p"]

_MEAN_GAP_BY_DTYPE: dict[DType, float] = {"bfloat16": 0.05, "float32": 1e-4}


class Core(Section):
    """The trainer."""

    aliases: ClassVar[dict[str, str]] = {
        "max_train_rollout_logprob_abs_diff": "max_mean_logprob_gap"
    }

    # Layout.
    backend: Literal["torch", "megatron"] = "torch"
    """Training backend."""
    tensor: int = Field(default=1, ge=1)
    """Tensor-parallel size of the trainer (megatron)."""
    pipeline: int = Field(default=1, ge=1)
    """Pipeline-parallel size of the trainer (megatron)."""
    context: int = Field(default=1, ge=1)
    """Context-parallel size: neighbouring ranks that share each packed row. Each has a slice of its
    tokens, and for attention a slice of the heads, so it divides the model's heads and key/value
    heads (torch)."""
    expert: int = Field(default=1, ge=1)
    """Expert-parallel size, within data x tensor x context (MoE, megatron)."""
    data: int | None = Field(default=None, ge=1)
    """Data-parallel size. Absent: what is left of the trainer's GPUs; 1 on CPU."""
    attention_backend: AttentionBackend = "auto"
    """What every GPU of the job must be able to run, or the preflight ends the start; `auto` is
    settled by cluster profile or GPU. The torch trainer takes attention, the gated activation and
    the output layer from flash-attn-4 and quack-kernels: with `flash_3` and `flash_4` or not at
    all, with `auto` where the packages, the GPU and `model.dtype` allow it; with `flash_2` and
    `sdpa` all is torch's own. The engine has its own setting (`rollout.engine_args`)."""
    max_tokens_per_gpu: int = Field(default=16384, ge=1)
    """Tokens of a packed row per rank; a row, and so a sequence, may have `context` times as many.
    """
    packing: Literal["tokens", "flops", "expert_aware"] = "tokens"
    """What is balanced over data ranks when sequences are packed."""
    activation_checkpointing: bool = True
    """Recompute layers in the backward pass instead of keeping their activations."""
    compile: bool = False
    """Compile the layers with torch.compile."""
    distributed_timeout: PositiveSeconds = 600.0
    """Limit of a trainer collective; never stretched by the infrastructure multiplier."""

    # Loss.
    loss: LossName = "grpo"
    """Row of the loss table; the cells below win where they are set."""
    normalize_std: bool | None = None
    """Divide centred rewards by the group's standard deviation; absent: by `loss`."""
    loss_aggregation: Aggregation | None = None
    """How token losses become one; absent: by `loss`."""
    eps_clip: float | None = None
    """Lower clip of the ratio; absent: by `loss`."""
    eps_clip_high: float | None = None
    """Upper clip of the ratio; absent: `eps_clip` where that is set, otherwise by `loss`."""
    dual_clip: float | None = None
    """Bound of the loss at negative advantages, above 1; absent: off."""
    kl: Literal["off", "k1", "k2", "k3"] = "off"
    """Estimator of the KL to the reference policy; the reference is held only when used."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL term in the loss."""
    kl_reward_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL subtracted from the reward; not together with `kl_coef`."""
    reference: RunPath | None = None
    """Model folder of the reference policy; absent: the initial model."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    entropy_metric: bool = False
    """Report the entropy although `entropy_coef` is 0."""
    old_policy: Literal["recompute", "behaviour"] = "recompute"
    """Denominator of the ratio: scored by the trainer before the first update on a collection, or
    the engine's log-probs."""
    tis: bool | None = None
    """Truncated importance sampling, weight exp(train - behaviour). Absent: on, except with
    `old_policy = "behaviour"`, whose ratio holds the correction already."""
    tis_clip: float = Field(default=2.0, gt=0)
    """Upper bound of the TIS weight."""
    tis_clip_low: float = Field(default=0.0, ge=0)
    """Lower bound of the TIS weight."""
    tis_level: Literal["token", "sequence"] = "token"
    """One weight per token, or one per response."""
    tis_mode: Literal["truncate", "mask"] = "truncate"
    """Weights outside the bounds are cut to them, or their tokens masked."""
    renormalize_support: bool = False
    """Score over the tokens that top-p, top-k and min-p kept, on both sides; allows them with
    TIS."""
    router_aux_coef: float = Field(default=0.0, ge=0)
    """Weight of the router's load-balancing loss (MoE)."""
    routing_replay: bool = False
    """Train with the expert choices recorded at rollout (MoE)."""

    # Optimizer.
    optimizer: OptimizerName = "adamw"
    """`sgd`: with momentum. `muon`: Muon for the matrices of layers and adapters, AdamW for
    embedding, head and vectors; its steps are scaled to AdamW's, so `lr` is one for both."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Decay of the momentum of `sgd` (absent: 0.9) and `muon` (0.95)."""
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate after the warm-up."""
    lr_schedule: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    """Course of the learning rate after the warm-up; `wsd` stays and falls linearly at its end."""
    lr_decay_updates: int | None = Field(default=None, ge=1)
    """Update at which the rate arrives at `min_lr`; absent: `max_updates`."""
    lr_decay_share: float = Field(default=0.1, gt=0, le=1)
    """Last part of the updates after the warm-up in which `wsd` falls."""
    min_lr: float = Field(default=0.0, ge=0)
    """Where the rate ends."""
    lr_scale: dict[str, float] = Field(default={})
    """Factors of the learning rate by weight name, with `*`: the first pattern that fits counts, 1
    where none does. 0 leaves weights as they are."""
    undecayed: Texts = ()
    """Weights that `weight_decay` leaves alone, by name with `*`, such as `"*norm.weight"`."""
    warmup_updates: int = Field(default=0, ge=0)
    """Updates over which the learning rate grows linearly from 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this global norm."""
    updates_per_collection: int = Field(default=1, ge=1)
    """Optimizer updates made from one collection; siblings stay in one update."""

    # Contracts.
    max_mean_logprob_gap: float | None = Field(default=None, gt=0)
    """Limit of the **mean** absolute gap of log-probs between trainer and engine at equal weights.
    Absent: 0.05 in bf16, 1e-4 in fp32. Its old name `max_train_rollout_logprob_abs_diff` is an
    alias; the figure is a mean, whatever "max" in that name suggests."""
    policy_grad_norm_every: int = Field(default=50, ge=1)
    """Updates between second backward passes that measure the policy gradient alone; only with
    other loss terms active."""
    max_skipped_steps: int = Field(default=0, ge=0)
    """Optimizer steps that may be skipped because a gradient was not finite."""

    # Publication.
    publication_mode: PublicationMode = "refresh"
    """`refresh`: swap under running responses; `drain`: let them finish first; `rolling`: engine by
    engine."""
    refresh_pause: RefreshPause = "in_place"
    """How `refresh` pauses engines that prove per-token spans: `in_place` keeps running responses
    where they are, `retract` has their keys computed again under the new weights, `abort` continues
    them as new requests. Engines without such spans always abort and continue."""
    publication_transport: PublicationTransport = "auto"
    """How weights travel; `auto` is settled in the plan and never switched later."""
    p2p_transfer_timeout: PositiveSeconds = 30.0
    """Further wait for p2p writes still in flight after the transport's own limit."""

    # Bounds.
    max_updates: int | None = Field(default=None, ge=1)
    """Updates after which the run is complete; absent: when the data's epochs are done."""
    max_run_seconds: Seconds | None = None
    """Wall-clock bound of the run, soft, above 0; absent: none."""
    debug_exit_after: int | None = None
    """Commit and stop, resumable, after this many updates of an attempt; at least 1."""

    @property
    def loss_row(self) -> LossRow:
        """The loss with every cell settled."""
        row = LOSSES[self.loss]
        high = self.eps_clip_high
        if high is None:
            high = row.eps_clip_high if self.eps_clip is None else self.eps_clip
        return LossRow(
            ratio=row.ratio,
            normalize_std=row.normalize_std if self.normalize_std is None else self.normalize_std,
            aggregation=self.loss_aggregation or row.aggregation,
            eps_clip=row.eps_clip if self.eps_clip is None else self.eps_clip,
            eps_clip_high=high,
        )

    @property
    def settled_momentum(self) -> float:
        """The momentum where the optimizer has one; 0 for AdamW, whose moments are others."""
        by_default = {"adamw": 0.0, "sgd": 0.9, "muon": 0.95}[self.optimizer]
        return by_default if self.momentum is None else self.momentum

    @property
    def uses_tis(self) -> bool:
        """TIS, settled: on unless switched off or the ratio holds the correction already."""
        return self.old_policy == "recompute" if self.tis is None else self.tis

    @property
    def uses_reference(self) -> bool:
        """A reference policy is held."""
        return self.kl != "off"

    def mean_logprob_gap(self, dtype: DType) -> float:
        """Limit of the policy_agreement contract, settled by precision where it is not set."""
        return self.max_mean_logprob_gap or _MEAN_GAP_BY_DTYPE[dtype]
