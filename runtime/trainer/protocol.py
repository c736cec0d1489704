"""What a trainer is to the session. One backend object per rank; rank r sees rank r's share.

Order of calls within an update: ``train_step`` (which scores the old policy itself where it must),
then any of ``export_weights`` and ``stage``. All ranks are called with the same sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.engines.protocol import TensorSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One sample as the trainer sees it: flat numpy, cheap to send between processes."""

    tokens: NDArray[np.int32]
    """[prompt + response]"""
    prompt_len: int
    logprobs: NDArray[np.float32]
    """[response] behaviour log-probs."""
    mask: NDArray[np.float32]
    """[response] loss mask."""
    advantage: float
    span_ends: NDArray[np.int32]
    """[spans] end of each policy span within the response."""
    span_updates: NDArray[np.int32]
    """[spans] the update of each span's policy."""
    prefill_update: int
    group: int
    """Position of its group within the collection; siblings stay in one optimizer step."""
    is_equal: bool
    """Its group's rewards are all equal."""
    teacher_logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    """[response] of a served teacher, or [response x K], place by place; empty without one."""
    teacher_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """[response x K] which tokens these are of; empty where they are the response's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One collection, whole; every rank gets all of it and takes its own bins by the same rule."""

    update: int
    """Last update this batch makes: the trainer's before it plus ``updates_per_collection``."""
    sequences: tuple[Sequence, ...]
    consumed_digest: str
    """Running digest of (update, group id) after this batch, as the ledger has it."""

    def __reduce__(self) -> tuple[object, ...]:
        # Thousands of small arrays are slow to send: they travel as a few long ones.
        return _unpacked, (self.update, self.consumed_digest, *_packed(self.sequences))


_PER_TOKEN = (
    "tokens", "logprobs", "mask", "span_ends", "span_updates", "teacher_logprobs", "teacher_ids",
)  # fmt: skip
_PER_SEQUENCE = ("prompt_len", "advantage", "prefill_update", "group", "is_equal")
_EMPTY = {"logprobs": np.float32, "mask": np.float32, "teacher_logprobs": np.float32}


def _packed(
    sequences: tuple[Sequence, ...],
) -> tuple[dict[str, NDArray[Any]], dict[str, list[Any]]]:
    """Each array field as one array with its lengths, each scalar field as a list."""
    arrays: dict[str, NDArray[Any]] = {}
    for name in _PER_TOKEN:
        parts = [getattr(sequence, name) for sequence in sequences]
        empty = np.empty(0, _EMPTY.get(name, np.int32))
        arrays[name] = np.concatenate(parts) if parts else empty
        arrays[f"{name}/lengths"] = np.array([len(part) for part in parts], np.int64)
    return arrays, {name: [getattr(s, name) for s in sequences] for name in _PER_SEQUENCE}


def _unpacked(
    update: int, digest: str, arrays: dict[str, NDArray[Any]], scalars: dict[str, list[Any]]
) -> TrainBatch:
    """The batch again; its arrays are views."""
    parts = {
        name: np.split(arrays[name], np.cumsum(arrays[f"{name}/lengths"])[:-1])
        for name in _PER_TOKEN
    }
    count = len(arrays["tokens/lengths"])
    fields: dict[str, Any] = {**parts, **scalars}
    sequences = tuple(Sequence(**{name: fields[name][i] for name in fields}) for i in range(count))
    return TrainBatch(update=update, sequences=sequences, consumed_digest=digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainMetrics:
    """What one ``train_step`` reports, equal on all ranks."""

    values: dict[str, float] = field(default_factory=dict[str, float])
    """Flat and finite; what was not measured is absent, never 0.

    Always: loss, policy_loss, lr, tokens (active ones), sequences, mixed_groups, equal_groups,
    policy_gradient_expected (0 or 1), parameter_change_norm, ratio_clip_share, optimizer_steps,
    skipped_steps (of this update), skipped_steps_total, refresh/mixed_responses, elapsed_s/<part>.
    When a step was taken: total_grad_norm, and policy_grad_norm where it was measured.
    When log-probs were measured: kl_train_behaviour, tis/ess, and tis/clip_share with TIS on.
    When some response is wholly of the current policy: agreement/ with gap_mean, gap_p99, gap_max,
    tokens, responses. When some response is mixed: refresh/prefix_ and refresh/latest_ with
    gap_mean, clip_share, tokens. With a reference: kl_loss. With a teacher: teacher_kl. When asked
    for: entropy.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedState:
    """A host copy of a rank's state, made and written while training goes on."""

    token: str
    bytes: int
    stall_s: float
    """Of the call. The next optimizer step waits for what is not copied then, and says how long:
    ``elapsed_s/staging_wait``."""


class TrainerBackend(Protocol):
    """One rank of the trainer. Sync methods, one at a time, ``write_staged`` excepted."""

    def load(self, model_path: str) -> dict[str, object]:
        """Load HF weights; returns vocab_size, num_parameters, tied, context_length, eos ids."""
        ...

    def score(
        self, sequences: tuple[Sequence, ...], *, temperature: float
    ) -> list[NDArray[np.float32]]:
        """Log-probs of each response's tokens under the current weights; same order."""
        ...

    def train_step(self, batch: TrainBatch) -> TrainMetrics:
        """One collection: ``updates_per_collection`` updates, an optimizer step each."""
        ...

    def weight_specs(self) -> list[TensorSpec]:
        """HF names, dtypes and shapes in export order; tied weights once."""
        ...

    def export_weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Full (unsharded) weights in buckets of at most ``bucket_bytes`` (a larger tensor alone).

        Collective: every rank iterates; only rank 0's tensors are meaningful.
        """
        ...

    def stage(self) -> StagedState:
        """Copy model, optimizer, scheduler, RNG, update counter and digest to host memory."""
        ...

    def write_staged(self, token: str, folder: str) -> dict[str, str]:
        """Write a staged copy as this rank's files into ``folder``; fsync them.

        Returns the SHA-256 of each file by its name.

        Runs in a thread beside ``train_step``. Frees the copy.
        """
        ...

    def restore(self, folder: str) -> dict[str, object]:
        """Load a committed state; ``update`` and ``consumed_digest``. Reshards if needed."""
        ...

    def stop(self) -> None:
        """Leave process groups and free memory. Idempotent."""
        ...
