"""From a collection to this rank's packed rows, and scoring, which needs nothing more."""

from __future__ import annotations

from collections import abc

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.trainer.packing import Bin, Cost, Unit, make_units, plan_bins
from runtime.trainer.protocol import Sequence
from runtime.trainer.torch.cute import MOST_SEQUENCES
from runtime.trainer.torch.layout import Kernel, PackedRow, pack_row
from runtime.trainer.torch.ranks import Ranks
from runtime.trainer.torch.scorer import PackedScorer

# Legend: R response tokens of the whole collection, N those of one row.


class Packer:
    """Plans and packs the bins of this rank; every rank makes the same plan by itself."""

    def __init__(
        self,
        ranks: Ranks,
        *,
        capacity: int,
        share_prompts: bool,
        cost: Cost,
        kernel: Kernel | None = None,
    ) -> None:
        self.ranks = ranks
        self._kernel: Kernel | None = kernel
        self._capacity = capacity
        self._share_prompts = share_prompts
        self._cost = cost

    def plan(self, sequences: abc.Sequence[Sequence], chosen: abc.Sequence[int]) -> list[list[Bin]]:
        """Bins of the chosen sequences, by rank, or group of ranks that share rows."""
        described = ((i, sequences[i]) for i in chosen)
        units = make_units(
            [(i, s.prompt_len, len(s.logprobs), _prompt_key(s)) for i, s in described],
            capacity=self._capacity,
            share_prompts=self._share_prompts,
        )
        return plan_bins(units, capacity=self._capacity, ranks=self.ranks.replicas, cost=self._cost)

    def rows(
        self, sequences: abc.Sequence[Sequence], chosen: abc.Sequence[int]
    ) -> abc.Generator[tuple[PackedRow, bool]]:
        """This rank's packed rows, and whether each one counts.

        See ``packed``.
        """
        return self.packed(self.bins(sequences, chosen), sequences, chosen)

    def bins(self, sequences: abc.Sequence[Sequence], chosen: abc.Sequence[int]) -> list[Bin]:
        """This rank's bins."""
        return self.plan(sequences, chosen)[self.ranks.replica]

    def packed(
        self, bins: list[Bin], sequences: abc.Sequence[Sequence], chosen: abc.Sequence[int]
    ) -> abc.Generator[tuple[PackedRow, bool]]:
        """Rows of ``bins``, one by one, and whether each one counts.

        A rank left without work gets a row that does not count: it takes part in the collectives
        inside the model, and its result is to be dropped.
        """
        for a_bin in bins:
            if a_bin:
                yield self._pack(a_bin, sequences), True
            else:
                some = sequences[chosen[0]]
                idle = [Unit(some.prompt_len, ((chosen[0], len(some.logprobs)),))]
                yield self._pack(idle, sequences), False

    def _pack(self, a_bin: Bin, sequences: abc.Sequence[Sequence]) -> PackedRow:
        is_short = sum(len(unit.members) for unit in a_bin) <= MOST_SEQUENCES
        return pack_row(
            a_bin,
            sequences,
            self.ranks.device,
            kernel=self._kernel if is_short or self._kernel is None else "torch",
            context=self.ranks.context,
        )


def _prompt_key(sequence: Sequence) -> tuple[int, bytes]:
    return sequence.group, sequence.tokens[: sequence.prompt_len].tobytes()


def flat_places(members: abc.Sequence[int], offset_S: NDArray[np.int64]) -> NDArray[np.int64]:
    """Flat places [N], within the collection, of the response tokens of a row's ``members``."""
    return np.concatenate([np.arange(offset_S[i], offset_S[i + 1]) for i in members])


@torch.no_grad()
def score(
    scorer: PackedScorer,
    packer: Packer,
    sequences: abc.Sequence[Sequence],
    offset_S: NDArray[np.int64],
) -> Tensor:
    """Log-probs of all response tokens: float32 [R] on the CPU, whole on every rank. Collective."""
    # Not waited for until all rows run: the host packs a row while the one before it runs.
    scored: list[tuple[abc.Sequence[int], Tensor]] = []
    for row, counts in packer.rows(sequences, range(len(sequences))):
        logprob_N, _, _ = scorer(row)
        if counts and packer.ranks.speaks:
            scored.append((row.members, logprob_N.to("cpu", non_blocking=True)))
    places = [flat_places(members, offset_S) for members, _ in scored]
    flat_R = np.zeros(int(offset_S[-1]), np.float32)
    if packer.ranks.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    for at, (_, logprob_N) in zip(places, scored, strict=True):
        flat_R[at] = logprob_N.numpy()
    return packer.ranks.add_up_on_cpu(torch.from_numpy(flat_R))


@torch.no_grad()
def score_likeliest(
    scorer: PackedScorer,
    packer: Packer,
    sequences: abc.Sequence[Sequence],
    offset_S: NDArray[np.int64],
    count: int,
) -> tuple[Tensor, Tensor]:
    """The likeliest tokens at every response token's place, whole on every rank. Collective.

    Returns:
        On the CPU: float32 [R, K] log-probs, int64 [R, K] token ids.
    """
    logprob_RK = torch.zeros(int(offset_S[-1]), count)
    id_RK = torch.zeros(int(offset_S[-1]), count, dtype=torch.int64)
    for row, counts in packer.rows(sequences, range(len(sequences))):
        logprob_NK, id_NK, _ = scorer(row, num_likeliest=count)
        if counts and packer.ranks.speaks:
            at = torch.from_numpy(flat_places(row.members, offset_S))
            logprob_RK[at], id_RK[at] = logprob_NK.cpu(), id_NK.cpu()
    ranks = packer.ranks
    return ranks.add_up_on_cpu(logprob_RK), ranks.add_up_on_cpu(id_RK)
