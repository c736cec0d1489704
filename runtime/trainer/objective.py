"""The whole objective over some whole sequences: every term, weighted, as one number to derive."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.trainer import losses
from runtime.trainer.losses import Segments
from runtime.trainer.settings import LossSettings

# Legend: T response tokens of whole sequences, one after another.


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs:
    """What the objective reads beside the model's output; nothing here carries a gradient."""

    segments: Segments
    weight_T: Tensor
    """``losses.token_weights`` of the whole optimizer batch, per token."""
    advantage_T: Tensor
    behaviour_T: Tensor
    old_T: Tensor | None
    """None: the old policy is the one being run, whose log-probs are the detached current ones."""
    train_T: Tensor | None
    """Trainer's log-probs before its first step on the collection; None as for ``old_T``."""
    reference_T: Tensor | None
    """None without KL."""
    teacher_T: Tensor | None = None
    """Teacher's log-probs of the sampled tokens; None unless it counts in the advantage."""
    teacher_TK: Tensor | None = None
    """Teacher's log-probs of its likeliest tokens; None unless it is a term of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Sums over tokens; only ``loss`` carries a gradient that is used."""

    loss: Tensor
    policy_loss: Tensor
    kl_loss: Tensor
    """Before ``kl_coef``."""
    teacher_loss: Tensor
    """Reverse KL to the teacher: of the loss term, before its weight, or as the advantage sees it;
    0 without a teacher."""
    num_clipped: Tensor
    num_active: Tensor


def objective(
    settings: LossSettings,
    *,
    logprob_T: Tensor,
    entropy_T: Tensor,
    also_TK: Tensor | None = None,
    inputs: TokenInputs,
    policy_only: bool = False,
) -> Objective:
    """Add up the terms.

    loss = sum of weight x (TIS weight x policy term + kl_coef x KL - entropy_coef x entropy
    + teacher_coef x reverse KL to the teacher)

    Args:
        settings: which terms there are.
        logprob_T: [T] under the weights being trained.
        entropy_T: [T] of their distributions; not read without an entropy term.
        also_TK: [T, K] of the teacher's likeliest tokens; not read without a teacher's loss.
        inputs: everything else.
        policy_only: leave KL, entropy and teacher out of ``loss``, to measure the policy gradient
            alone.
    """
    now_T = logprob_T.detach()
    old_T = now_T if inputs.old_T is None else inputs.old_T
    tis = losses.importance_weights(
        settings,
        inputs.segments,
        train_T=now_T if inputs.train_T is None else inputs.train_T,
        behaviour_T=inputs.behaviour_T,
    )
    policy = losses.policy_loss(
        settings,
        inputs.segments,
        logprob_T=logprob_T,
        old_T=old_T,
        advantage_T=_advantage(settings, old_T, inputs),
    )
    weight_T = losses.only_active(inputs.weight_T, inputs.segments.active_T)
    policy_loss = (weight_T * tis.weight_T * policy.loss_T).sum()
    kl_loss = torch.zeros_like(policy_loss)
    if inputs.reference_T is not None:
        kl_T = losses.kl_estimate(
            settings.kl,
            logprob_T=logprob_T,
            reference_T=inputs.reference_T,
            active_T=inputs.segments.active_T,
        )
        kl_loss = (weight_T * kl_T).sum()
    teacher_loss = _teacher_loss(weight_T, old_T, also_TK, inputs)
    loss = policy_loss
    if not policy_only and settings.has_teacher_loss:
        loss = loss + settings.teacher_coef * teacher_loss
    if not policy_only and settings.kl_coef:
        loss = loss + settings.kl_coef * kl_loss
    if not policy_only and settings.entropy_coef:
        entropy = (weight_T * losses.only_active(entropy_T, inputs.segments.active_T)).sum()
        loss = loss - settings.entropy_coef * entropy
    return Objective(
        loss=loss,
        policy_loss=policy_loss,
        kl_loss=kl_loss,
        teacher_loss=teacher_loss,
        num_clipped=policy.clipped_T.sum(),
        num_active=inputs.segments.active_T.sum(),
    )


def _advantage(settings: LossSettings, old_T: Tensor, inputs: TokenInputs) -> Tensor:
    """KL and the teacher are penalties per token on the old policy's own samples."""
    advantage_T = inputs.advantage_T
    if inputs.teacher_T is not None:
        advantage_T = losses.distilled_advantage(
            advantage_T,
            coef=settings.teacher_coef,
            student_T=old_T,
            teacher_T=inputs.teacher_T,
            active_T=inputs.segments.active_T,
        )
    if inputs.reference_T is None or settings.kl_reward_coef == 0:
        return advantage_T
    penalty_T = losses.kl_estimate(
        settings.kl,
        logprob_T=old_T,
        reference_T=inputs.reference_T,
        active_T=inputs.segments.active_T,
    )
    return advantage_T - settings.kl_reward_coef * penalty_T


def _teacher_loss(
    weight_T: Tensor, old_T: Tensor, also_TK: Tensor | None, inputs: TokenInputs
) -> Tensor:
    active_T = inputs.segments.active_T
    if inputs.teacher_TK is not None and also_TK is not None:
        kl_T = losses.bucketed_reverse_kl(also_TK, inputs.teacher_TK, active_T)
        return (weight_T * kl_T).sum()
    if inputs.teacher_T is not None:
        return (weight_T * losses.only_active(old_T - inputs.teacher_T, active_T)).sum()
    return torch.zeros_like(weight_T.sum())
