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


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Sums over tokens; only ``loss`` carries a gradient that is used."""

    loss: Tensor
    policy_loss: Tensor
    kl_loss: Tensor
    """Before ``kl_coef``."""
    num_clipped: Tensor
    num_active: Tensor


def objective(
    settings: LossSettings,
    *,
    logprob_T: Tensor,
    entropy_T: Tensor,
    inputs: TokenInputs,
    policy_only: bool = False,
) -> Objective:
    """Add up the terms.

    loss = sum of weight x (TIS weight x policy term + kl_coef x KL - entropy_coef x entropy)

    Args:
        settings: which terms there are.
        logprob_T: [T] under the weights being trained.
        entropy_T: [T] of their distributions; not read without an entropy term.
        inputs: everything else.
        policy_only: leave KL and entropy out of ``loss``, to measure the policy gradient alone.
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
    loss = policy_loss
    if not policy_only and settings.kl_coef:
        loss = loss + settings.kl_coef * kl_loss
    if not policy_only and settings.entropy_coef:
        entropy = (weight_T * losses.only_active(entropy_T, inputs.segments.active_T)).sum()
        loss = loss - settings.entropy_coef * entropy
    return Objective(
        loss=loss,
        policy_loss=policy_loss,
        kl_loss=kl_loss,
        num_clipped=policy.clipped_T.sum(),
        num_active=inputs.segments.active_T.sum(),
    )


def _advantage(settings: LossSettings, old_T: Tensor, inputs: TokenInputs) -> Tensor:
    """KL in the reward is a penalty per token on the old policy's own samples."""
    if inputs.reference_T is None or not settings.has_kl_in_advantage:
        return inputs.advantage_T
    penalty_T = losses.kl_estimate(
        settings.kl,
        logprob_T=old_T,
        reference_T=inputs.reference_T,
        active_T=inputs.segments.active_T,
    )
    return inputs.advantage_T - settings.kl_reward_coef * penalty_T
