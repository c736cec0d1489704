"""What does not go together in sampling, loss, teacher and bounds."""

from __future__ import annotations

from collections.abc import Iterator

from configs.names import ENV_NAME
from configs.rules.finding import Finding, refused, warned
from configs.rules.inputs import Rule
from configs.run import RunSpec
from configs.shape import ModelShape
from configs.teacher import Teacher

_KEEPS_SECRETS = ("kuberay", "beaker")
"""Launch backends whose schedulers hand secrets to jobs."""


def _sampling(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    rollout, core = spec.rollout, spec.core
    if rollout.temperature == 0:
        yield refused(
            "rollout.temperature",
            because="no distribution to train on",
            allowed="a temperature above 0",
        )
    if rollout.top_k == 0:
        yield refused(
            "rollout.top_k", because="no token would be left", allowed="-1 (off), or 1 and more"
        )
    opd_without_rewards = spec.algorithm == "opd" and spec.reward.verifier is None
    if rollout.samples_per_prompt < 2 and not opd_without_rewards:
        yield refused(
            "rollout.samples_per_prompt",
            "algorithm",
            "reward.verifier",
            because="the group mean needs two samples; one is allowed only for OPD without rewards",
            allowed="2 or more",
        )
    narrowed = {
        "rollout.top_p": rollout.top_p < 1,
        "rollout.top_k": rollout.top_k > 0,
        "rollout.min_p": rollout.min_p > 0,
    }
    for field in (name for name, is_set in narrowed.items() if is_set):
        if core.uses_tis and not core.renormalize_support:
            yield refused(
                field,
                "core.tis",
                "core.renormalize_support",
                because="TIS compares log-probs over all tokens; this leaves some out of sampling",
                allowed="set top-p 1 (top-k -1, min-p 0), switch TIS off, or "
                "core.renormalize_support = true",
            )


def _old_policy(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    if spec.core.old_policy == "behaviour" and spec.core.tis is True:
        yield refused(
            "core.tis",
            "core.old_policy",
            because='with old_policy = "behaviour" the ratio holds the correction already',
            allowed='leave tis out, or old_policy = "recompute"',
        )


def _reinforce(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    core = spec.core
    if core.loss != "reinforce":
        return
    for key in ("eps_clip", "eps_clip_high", "dual_clip"):
        if getattr(core, key) is not None:
            yield refused(
                f"core.{key}",
                "core.loss",
                because='"reinforce" has no ratio to clip',
                allowed=f"drop core.{key}",
            )
    if spec.async_.max_staleness > 0 and not core.uses_tis:
        yield refused(
            "async.max_staleness",
            "core.tis",
            "core.old_policy",
            "core.loss",
            because='"reinforce" without TIS corrects nothing when responses are stale',
            allowed="drop core.tis = false, or set async.max_staleness = 0",
        )


def _clipping(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    core = spec.core
    if core.loss == "gspo" and core.loss_row.aggregation != "sample":
        yield refused(
            "core.loss_aggregation",
            "core.loss",
            because='"gspo" has one ratio per sequence; only core.loss_aggregation = "sample" '
            "weighs it as one",
            allowed='core.loss_aggregation = "sample", or another core.loss',
        )
    for key in ("eps_clip", "eps_clip_high"):
        value = getattr(core, key)
        if value is not None and not 0 < value < 1:
            yield refused(f"core.{key}", because="a clip lies in (0, 1)", allowed="between 0 and 1")
    if core.dual_clip is not None and core.dual_clip <= 1:
        yield refused(
            "core.dual_clip",
            because="dual_clip bounds a ratio above 1",
            allowed="above 1, or leave it out",
        )
    if core.tis_clip_low >= core.tis_clip:
        yield refused(
            "core.tis_clip_low",
            "core.tis_clip",
            because=f"tis_clip_low {core.tis_clip_low:g} is not below tis_clip {core.tis_clip:g}",
        )


def _kl(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    core = spec.core
    if core.kl_coef > 0 and core.kl_reward_coef > 0:
        yield refused(
            "core.kl_reward_coef",
            "core.kl_coef",
            because="KL in the loss (kl_coef) and in the reward (kl_reward_coef)",
            allowed="one of core.kl_coef and core.kl_reward_coef",
        )
    weighted = core.kl_coef > 0 or core.kl_reward_coef > 0
    if core.uses_reference != weighted:
        yield refused(
            *(("core.kl",) if core.uses_reference else ()),
            "core.kl_coef",
            "core.kl_reward_coef",
            "core.kl",
            because="kl names the estimator, kl_coef or kl_reward_coef its weight; one is missing",
            allowed='kl = "k3" with a weight above 0, or neither',
        )
    if core.reference is not None and not core.uses_reference:
        yield refused(
            "core.reference", "core.kl", because="the reference is held only when KL is used"
        )


def _schedule(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    core = spec.core
    has_end = core.max_updates is not None or core.lr_decay_updates is not None
    if core.lr_schedule != "constant" and not has_end:
        yield refused(
            "core.lr_schedule",
            "core.lr_decay_updates",
            "core.max_updates",
            because=f"{core.lr_schedule} needs to know where it ends",
            allowed="core.lr_decay_updates or core.max_updates",
        )
    for pattern, factor in core.lr_scale.items():
        if factor < 0:
            yield refused(
                f"core.lr_scale.{pattern}",
                because="a negative rate climbs the loss",
                allowed="0 or more",
            )
    if core.min_lr > core.lr:
        yield refused("core.min_lr", "core.lr", because="min_lr is above lr")
    if core.max_run_seconds is not None and core.max_run_seconds <= 0:
        yield refused(
            "core.max_run_seconds",
            because="a run of no length",
            allowed="above 0; leave the key out for no bound",
        )
    if core.debug_exit_after is not None and core.debug_exit_after < 1:
        yield refused(
            "core.debug_exit_after",
            because="an exit before the first update",
            allowed="1 or more; leave the key out for no bound",
        )


def _publication(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    core = spec.core
    is_set = "p2p_transfer_timeout" in core.model_fields_set
    if is_set and core.publication_transport != "p2p":
        yield refused(
            "core.p2p_transfer_timeout",
            "core.publication_transport",
            because="only p2p waits for writes in flight",
            allowed="drop core.p2p_transfer_timeout",
        )


def _optimizer(spec: RunSpec, shape: ModelShape | None) -> Iterator[Finding]:
    core = spec.core
    if core.optimizer == "adamw" and core.momentum is not None:
        yield refused(
            "core.momentum",
            "core.optimizer",
            because="AdamW has no momentum of this kind",
            allowed='core.beta1, or core.optimizer = "sgd" or "muon"',
        )
    if core.optimizer == "sgd":
        for key in ("beta1", "beta2", "adam_eps"):
            if key in core.model_fields_set:
                yield refused(
                    f"core.{key}",
                    "core.optimizer",
                    because='"sgd" has no moments of AdamW',
                    allowed=f"drop core.{key}; core.momentum is its own",
                )
    if core.optimizer == "muon" and shape is not None and shape.is_moe:
        yield refused(
            "core.optimizer",
            because="the experts of a layer lie in one tensor, which muon has no step for",
            allowed='"adamw" or "sgd"',
        )
    if core.optimizer != "adamw" and core.backend == "megatron":
        yield refused(
            "core.optimizer",
            "core.backend",
            because=f'the megatron backend has no "{core.optimizer}"',
            allowed='core.backend = "torch"',
        )


def _batches(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    groups, updates = spec.rollout.groups_per_collection, spec.core.updates_per_collection
    if groups % updates:
        yield refused(
            "core.updates_per_collection",
            "rollout.groups_per_collection",
            because=f"{groups} groups do not divide into {updates} updates of whole groups",
            allowed=f"a divisor of {groups}",
        )
    if 0 < spec.async_.max_staleness < updates:
        yield warned(
            "async.max_staleness",
            because=f"async.max_staleness {spec.async_.max_staleness} is below "
            f"updates_per_collection {updates}: generation stays in step with training",
        )
    if spec.core.max_updates is not None and spec.core.max_updates % updates:
        yield warned(
            "core.max_updates",
            because=f"core.max_updates {spec.core.max_updates} rounds up to a whole collection of "
            f"{updates} updates",
        )
    wanted = spec.async_.async_max_concurrent_samples
    if wanted is not None and wanted < spec.rollout.samples_per_prompt:
        yield refused(
            "async.async_max_concurrent_samples",
            "rollout.samples_per_prompt",
            because="not one whole group fits",
            allowed=f"{spec.rollout.samples_per_prompt} or more",
        )


def _teacher(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    teacher = spec.teacher
    if spec.algorithm == "opd" and teacher is None:
        yield refused(
            "teacher", "algorithm", because="OPD needs a [teacher]", allowed="path or url"
        )
    if spec.algorithm == "grpo" and teacher is not None:
        yield refused(
            "teacher", "algorithm", because="GRPO has no teacher", allowed='algorithm = "opd"'
        )
    if teacher is not None and (teacher.path is None) == (not teacher.url):
        word = "neither" if teacher.path is None else "both"
        yield refused(
            "teacher.path",
            "teacher.url",
            because=f"{word} of path and url set",
            allowed="path (held by the trainer) or url (SGLang)",
        )
    if teacher is not None and teacher.url:
        yield from _served_teacher(spec, teacher)
    elif teacher is not None:
        for key in ("token_env", "deadline", "concurrency"):
            if key in teacher.model_fields_set:
                yield refused(
                    f"teacher.{key}",
                    "teacher.path",
                    because="a teacher held by the trainer is asked over no network",
                    allowed=f"drop teacher.{key}, or teacher.url",
                )


def _served_teacher(spec: RunSpec, teacher: Teacher) -> Iterator[Finding]:
    if spec.rollout.temperature != 1:
        yield refused(
            "rollout.temperature",
            "teacher.url",
            because="servers tell log-probs of a given text at temperature 1, the student's are at "
            f"{spec.rollout.temperature:g}",
            allowed="rollout.temperature = 1, or teacher.path",
        )
    name, launch = teacher.token_env, spec.launch
    if name is not None and ENV_NAME.fullmatch(name) is None:
        yield refused(
            "teacher.token_env",
            because="no name of an environment variable (the token itself never stands in a file)",
            allowed='such as "TEACHER_TOKEN"',
        )
    elif name is not None and launch.backend in _KEEPS_SECRETS and name not in launch.secrets:
        yield refused(
            "teacher.token_env",
            "launch.secrets",
            because=f"nothing brings {name} into the job",
            allowed=f'launch.secrets = {{ {name} = "name-of-a-secret" }}',
        )


def _lora(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    idle = sorted(spec.lora.model_fields_set - {"rank"})
    if spec.lora.rank == 0 and idle:
        yield warned(
            "lora.rank",
            because=f"lora.rank is 0, so {', '.join(f'lora.{key}' for key in idle)} change nothing",
        )
    if spec.lora.rank > 0 and spec.core.backend == "megatron":
        yield refused(
            "lora.rank",
            "core.backend",
            because="the megatron backend has no adapters",
            allowed='core.backend = "torch"',
        )
    if not spec.lora.publishes_adapter:
        return
    if spec.rollout.engine == "sglang":
        yield refused(
            "lora.publish",
            "rollout.engine",
            because="an engine of SGLang lists no checksums of adapters, and running requests keep "
            "the one they began with: neither weights nor policy ids could be verified",
            allowed='rollout.engine = "embedded", or publish = "merged"',
        )
    if spec.core.publication_transport not in ("auto", "disk"):
        yield refused(
            "core.publication_transport",
            "lora.publish",
            because="an adapter travels as files",
            allowed='"disk" or "auto", or lora.publish = "merged"',
        )


TRAINING_RULES: tuple[Rule, ...] = (
    _sampling,
    _old_policy,
    _reinforce,
    _clipping,
    _kl,
    _schedule,
    _optimizer,
    _publication,
    _batches,
    _teacher,
    _lora,
)
