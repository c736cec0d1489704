"""A collection in, new weights out, in one or more updates. The story is in ``Update.run``."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.trainer import contracts, losses
from runtime.trainer.flat import flatten, served_scores
from runtime.trainer.objective import TokenInputs, objective
from runtime.trainer.packing import split_into_steps
from runtime.trainer.protocol import TrainBatch
from runtime.trainer.settings import TrainerSettings
from runtime.trainer.torch.layout import PackedRow, to_device
from runtime.trainer.torch.lora import base_only
from runtime.trainer.torch.optimizer import Optimizer, global_norm, learning_rate
from runtime.trainer.torch.packer import Packer, flat_places, score, score_likeliest
from runtime.trainer.torch.results import SUMS, RowResult
from runtime.trainer.torch.scorer import PackedScorer
from runtime.trainer.torch.weights import Weights

# Legend: S sequences, R response tokens of the whole collection; N response tokens of one row.


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """What lives longer than an update."""

    settings: TrainerSettings
    weights: Weights
    optimizer: Optimizer
    packer: Packer
    reference: PackedScorer | None
    """None without KL, and where the base under the adapters is the reference."""
    teacher: PackedScorer | None = None
    """None without distillation."""
    settle: Callable[[], None] = lambda: None
    """Returns when weights and moments may be changed: they may be being copied for a commit."""


class Update:
    """One call of ``train_step``; used once."""

    def __init__(self, machinery: Machinery, batch: TrainBatch, *, skipped_before: int) -> None:
        self._m = machinery
        self._loss = machinery.settings.loss
        self._ranks = machinery.weights.ranks
        self._batch = batch
        self._before = batch.update - machinery.settings.updates_per_collection
        """The trainer's update when the collection came."""
        self._flat = flatten(batch.sequences)
        self.skipped_total = skipped_before
        self._skipped_before = skipped_before
        # Trainer's log-probs before its first step on the collection, where they are known.
        self._train_R = torch.zeros(self._flat.num_tokens)
        self._measured_R = np.zeros(self._flat.num_tokens, dtype=np.bool_)
        self._is_scored_ahead = False
        self._reference_R: Tensor | None = None
        self._teacher_R: Tensor | None = None
        self._teacher_RK: Tensor | None = None
        self._likeliest_RK: Tensor | None = None
        """Token ids that ``_teacher_RK`` is of."""
        self._entropy_R = torch.zeros(self._flat.num_tokens)
        self._sums: dict[str, float] = defaultdict(float)
        self._norms: dict[str, list[float]] = defaultdict(list)
        self._seconds: dict[str, float] = defaultdict(float)
        self._values: dict[str, float] = {}

    def run(self) -> dict[str, float]:
        """Score what must be scored, make the optimizer steps, check the contracts, report.

        Returns:
            Flat metrics, all finite; what was not measured is absent.

        Raises:
            ContractViolation: before any weight is touched, when trainer and engine disagree; when
                equal groups show a policy gradient; past the limit of skipped steps.
        """
        settings = self._m.settings
        steps = split_into_steps(self._flat.group_S.tolist(), settings.updates_per_collection)
        before = self._masters_to_compare(num_steps=len(steps))
        try:
            with self._timed("scoring"):
                self._score_ahead(num_steps=len(steps))
            for number, chosen in enumerate(steps):
                self._one_step(chosen, self._before + number + 1, is_first=number == 0)
        finally:
            self._m.weights.drop_gradients()
        self._report(before, num_steps=len(steps))
        return {name: value for name, value in self._values.items() if math.isfinite(value)}

    def _masters_to_compare(self, *, num_steps: int) -> list[Tensor] | None:
        """Copies of the masters; None where the only step measures its change itself."""
        if num_steps == 1 and self._m.optimizer.measures_change:
            return None
        return [master.detach().clone() for master in self._m.weights.masters]

    def _score_ahead(self, *, num_steps: int) -> None:
        """Log-probs that the forward pass of training cannot give: old, reference, teacher's.

        With one optimizer step the old policy *is* the policy of that forward pass, so its
        log-probs are the detached current ones: numerically the same, and one pass less. Not so
        with dropout, which that pass has and sampling had not.
        """
        m, loss = self._m, self._loss
        what = (m.packer, self._batch.sequences, self._flat.offset_S)
        lora = m.settings.lora
        has_dropout = lora is not None and lora.dropout > 0
        if loss.old_policy == "recompute" and (num_steps > 1 or has_dropout):
            self._train_R = score(m.weights.scorer, *what)
            self._measured_R[:] = True
            self._is_scored_ahead = True
        if m.reference is not None:
            self._reference_R = score(m.reference, *what)
        elif loss.uses_reference and lora is not None:
            with base_only(m.weights.scorer, lora):
                self._reference_R = score(m.weights.scorer, *what)
        if m.teacher is not None and loss.has_teacher_loss:
            self._teacher_RK, self._likeliest_RK = score_likeliest(
                m.teacher, *what, loss.teacher_top_k
            )
        elif m.teacher is not None:
            self._teacher_R = score(m.teacher, *what)
        elif m.settings.teacher_is_served and loss.teacher_coef != 0:
            self._take_served()

    def _take_served(self) -> None:
        """What a served teacher said came with the sequences."""
        top_k = self._loss.teacher_top_k
        logprob_RK, id_RK = served_scores(self._batch.sequences, top_k)
        if top_k:
            self._teacher_RK = torch.from_numpy(logprob_RK)
            self._likeliest_RK = torch.from_numpy(id_RK)
        else:
            self._teacher_R = torch.from_numpy(logprob_RK[:, 0])

    def _one_step(self, chosen: list[int], update: int, *, is_first: bool) -> None:
        policy_norm = self._policy_norm_alone(chosen, update)
        with self._timed("forward_backward"):
            record = is_first and not self._is_scored_ahead
            for name, value in self.accumulate(chosen, record=record).items():
                self._sums[name] += value
            if is_first:  # on a GPU the backward pass still runs meanwhile
                self._check_agreement()
            optimizer = self._m.optimizer
            # A batch without a policy gradient is looked at before anything is changed.
            unseen = optimizer.steps_unseen and self._expects_policy_gradient(chosen)
            norm = None if unseen else optimizer.grad_norm()
        with self._timed("staging_wait"):
            self._m.settle()
        with self._timed("forward_backward" if norm is None else "optimizer"):
            if norm is None:
                norm = optimizer.step_unseen(update)
                is_taken = math.isfinite(norm)
            else:
                if not self._expects_policy_gradient(chosen):
                    measured = policy_norm if self._loss.has_other_terms else norm
                    if math.isfinite(measured or 0.0):
                        contracts.require_no_policy_gradient(measured, update=update)
                is_taken = optimizer.step(update, norm)
        if not self._loss.has_other_terms:
            policy_norm = norm
        if is_taken:
            self._norms["total_grad_norm"].append(norm)
            if policy_norm is not None:
                self._norms["policy_grad_norm"].append(policy_norm)
            return
        self.skipped_total += 1
        contracts.require_finite_steps(
            self.skipped_total,
            limit=self._m.settings.max_skipped_steps,
            update=update,
        )

    def _policy_norm_alone(self, chosen: list[int], update: int) -> float | None:
        """A backward pass of its own with the other terms at 0; None where it is not due."""
        due = (update - 1) % self._m.settings.policy_grad_norm_every == 0
        if not self._loss.has_other_terms or not due:
            return None
        with self._timed("diagnostics"):
            self.accumulate(chosen, policy_only=True)
            norm = self._m.optimizer.grad_norm()
            self._m.weights.drop_gradients()
        return norm

    def _expects_policy_gradient(self, chosen: list[int]) -> bool:
        return self._loss.has_token_advantage or not bool(self._flat.is_equal_S[chosen].all())

    def accumulate(
        self, chosen: list[int], *, record: bool = False, policy_only: bool = False
    ) -> dict[str, float]:
        """Forward and backward over this rank's bins of one optimizer batch; sums over all ranks.

        Gradients add up in the masters, already as the gradient of the whole batch.

        Args:
            chosen: positions of the sequences of the batch.
            record: keep the log-probs as the trainer's before its first step.
            policy_only: leave every other term out of the gradient.
        """
        weight_S = np.zeros(self._flat.num_sequences)
        weight_S[chosen] = losses.token_weights(
            self._loss.aggregation,
            self._flat.active_per_sequence()[chosen],
            max_response_tokens=self._loss.max_response_tokens,
        )
        bins = self._m.packer.bins(self._batch.sequences, chosen)
        self._m.weights.expect(num_rows=len(bins))
        rows = [
            self._run_row(row, weight_S * counts, counts, policy_only)
            for row, counts in self._m.packer.packed(bins, self._batch.sequences, chosen)
        ]
        # Only now: until here the host ran ahead, packing one row while the one before it ran.
        total = torch.zeros(len(SUMS), dtype=torch.float64)
        for row in rows:
            row.wait()
            if not row.counts:
                continue
            total += row.sums
            if record:
                self._train_R[row.at] = row.logprob_N
            if row.entropy_N is not None:
                self._entropy_R[row.at] = row.entropy_N
        if record:
            self._train_R = self._ranks.add_up_on_cpu(self._train_R)
            self._measured_R = np.isin(self._flat.seq_R, chosen)
        return dict(zip(SUMS, self._ranks.add_up_on_cpu(total).tolist(), strict=True))

    def _run_row(
        self, row: PackedRow, weight_S: NDArray[np.float64], counts: bool, policy_only: bool
    ) -> RowResult:
        with_entropy = self._loss.needs_entropy and not policy_only
        at = flat_places(row.members, self._flat.offset_S)
        also_NK = self._picked(self._likeliest_RK, at)
        logprob_N, entropy_N, also_NK = self._m.weights.scorer(
            row, with_entropy=with_entropy, also_RK=also_NK
        )
        inputs = self._inputs(row, at, weight_S)  # while the forward pass runs
        result = objective(
            self._loss,
            logprob_T=logprob_N,
            entropy_T=entropy_N,
            also_TK=also_NK,
            inputs=inputs,
            policy_only=policy_only,
        )
        # Sent before the backward pass is queued, so that they arrive while it runs.
        kept = RowResult.sent(
            at,
            result,
            logprob_N,
            entropy_N if with_entropy else None,
            counts=counts and self._ranks.speaks,
        )
        result.loss.backward()
        return kept

    def _inputs(
        self, row: PackedRow, at: NDArray[np.int64], weight_S: NDArray[np.float64]
    ) -> TokenInputs:
        device = self._ranks.device
        flat = self._flat
        seq_N = flat.seq_R[at]
        behaviour_N = to_device(flat.behaviour_R[at], device)
        train_N = to_device(self._train_R[at].numpy(), device) if self._is_scored_ahead else None
        return TokenInputs(
            segments=losses.Segments(
                active_T=to_device(flat.active_R[at], device),
                seq_T=row.seq_R,
                num_sequences=row.num_sequences,
            ),
            weight_T=to_device(weight_S[seq_N].astype(np.float32), device),
            advantage_T=to_device(flat.advantage_S[seq_N], device),
            behaviour_T=behaviour_N,
            old_T=behaviour_N if self._loss.old_policy == "behaviour" else train_N,
            train_T=train_N,
            reference_T=self._picked(self._reference_R, at),
            teacher_T=self._picked(self._teacher_R, at),
            teacher_TK=self._picked(self._teacher_RK, at),
        )

    def _picked(self, flat_R: Tensor | None, at: NDArray[np.int64]) -> Tensor | None:
        """A row's part of what was scored ahead, on this rank's device."""
        return None if flat_R is None else to_device(flat_R[at].numpy(), self._ranks.device)

    def _check_agreement(self) -> None:
        figures = contracts.policy_agreement(
            self._flat,
            self._train_R.numpy(),
            self._measured_R,
            current_update=self._before,
        )
        self._values.update(figures)
        contracts.require_agreement(
            figures, limit=self._m.settings.max_mean_logprob_gap, update=self._batch.update
        )

    def _report(self, before: list[Tensor] | None, *, num_steps: int) -> None:
        flat, values = self._flat, self._values
        mixed, equal = flat.num_groups()
        expected = self._expects_policy_gradient(list(range(flat.num_sequences)))
        active = max(self._sums["active"], 1.0)
        values.update(
            {name: self._sums[name] / num_steps for name in ("loss", "policy_loss")},
            ratio_clip_share=self._sums["clipped"] / active,
            tokens=self._sums["active"],
            sequences=float(flat.num_sequences),
            mixed_groups=float(mixed),
            equal_groups=float(equal),
            policy_gradient_expected=float(expected),
            optimizer_steps=float(len(self._norms["total_grad_norm"])),
            skipped_steps=float(self.skipped_total - self._skipped_before),
            skipped_steps_total=float(self.skipped_total),
            lr=learning_rate(self._m.settings.optimizer, self._batch.update),
        )
        values.update({name: sum(n) / len(n) for name, n in self._norms.items() if n})
        if self._reference_R is not None:
            values["kl_loss"] = self._sums["kl_loss"] / num_steps
        if self._teacher_R is not None or self._teacher_RK is not None:
            values["teacher_kl"] = self._sums["teacher_loss"] / num_steps
        if self._loss.needs_entropy:
            entropy_R = self._ranks.add_up_on_cpu(self._entropy_R)
            values["entropy"] = entropy_R[torch.from_numpy(flat.active_R)].double().mean().item()
        self._report_mismatch()  # beside the optimizer's kernel, which the next line waits for
        with self._timed("optimizer"):
            values["parameter_change_norm"] = self._change_norm(before)
        values.update({f"elapsed_s/{name}": s for name, s in self._seconds.items()})

    def _change_norm(self, before: list[Tensor] | None) -> float:
        if before is None:
            taken = bool(self._norms["total_grad_norm"])
            return self._m.optimizer.change_norm() if taken else 0.0
        after = self._m.weights.masters
        change = [old.sub_(new.detach()) for old, new in zip(before, after, strict=True)]
        return global_norm(change, self._ranks)

    def _report_mismatch(self) -> None:
        """Trainer against engine over all measured tokens, policy age included."""
        flat = self._flat
        known_R = torch.from_numpy(flat.active_R & self._measured_R)
        behaviour_R = torch.from_numpy(flat.behaviour_R)
        tis = losses.importance_weights(
            self._loss,
            losses.Segments(
                active_T=known_R,
                seq_T=torch.from_numpy(flat.seq_R),
                num_sequences=flat.num_sequences,
            ),
            train_T=self._train_R,
            behaviour_T=behaviour_R,
        )
        if known_R.any():
            self._values["kl_train_behaviour"] = losses.kl_train_behaviour(
                self._train_R, behaviour_R, known_R
            )
            self._values["tis/ess"] = losses.effective_sample_share(tis.raw_T, known_R)
            if self._loss.tis:
                self._values["tis/clip_share"] = tis.outside_T[known_R].double().mean().item()
        self._values.update(
            contracts.refresh_scores(
                flat, self._train_R.numpy(), tis.outside_T.numpy(), self._measured_R
            )
        )

    @contextmanager
    def _timed(self, name: str) -> Generator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - started
