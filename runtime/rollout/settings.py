"""What the run file settled for the producer, and the bound on groups that follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from configs.run import RunSpec
from runtime.data.routed import RouterShape
from runtime.engines.protocol import SamplingSettings
from runtime.errors import ConfigError
from runtime.waits import stretched


def drain_deadline_s(spec: RunSpec) -> float:
    """Longest wait for admitted calls when the gate shuts, for publication and evaluation alike."""
    return stretched("drain", spec.rollout.drain_deadline)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """Bounds, deadlines and sampling of one run."""

    epoch: int
    """The ownership epoch; samples of any other are refused."""
    vocab_size: int
    groups_per_collection: int
    samples_per_prompt: int
    sampling: SamplingSettings
    max_concurrent_samples: int
    """Samples in flight at most; whole groups go out, so at least ``samples_per_prompt``."""
    router: RouterShape | None = None
    """Record which experts read each token; the model's shape."""
    updates_per_collection: int = 1
    max_staleness: int = 4
    buffer_collections: int = 1
    """Finished collections the buffer holds; a group more is back-pressure on admission."""
    waiting_deadline_s: float = 600.0
    """From a group's admission to its first request, in open-gate time."""
    running_deadline_s: float = 1800.0
    """Added from the first request on; the engine's own, typed waiting limit comes first."""
    drain_deadline_s: float = 600.0
    hold_off_s: float = 1.0
    """No new group is admitted for so long after a serving error."""
    filter_max_rounds: int = 10
    """Collections' worth of groups that filters may reject for one they let through."""

    def __post_init__(self) -> None:
        if self.max_concurrent_samples < self.samples_per_prompt:
            raise ConfigError(
                f"async_max_concurrent_samples = {self.max_concurrent_samples} holds no whole "
                f"group of {self.samples_per_prompt} samples"
            )

    @property
    def max_admitted_groups(self) -> int:
        """Bound on groups admitted and not yet consumed, those in training included."""
        ahead = self.max_staleness // self.updates_per_collection
        return self.groups_per_collection * (ahead + 1)

    @property
    def max_buffered_groups(self) -> int:
        """Groups the buffer holds before it pushes back."""
        return self.groups_per_collection * self.buffer_collections

    @property
    def call_deadline_s(self) -> float:
        """Limit of one HTTP call: what its group may take with the gate open, and one drain."""
        return self.waiting_deadline_s + self.running_deadline_s + self.drain_deadline_s

    def takes_left(self, oldest: int, trainer: int) -> int:
        """In how many takes from now on a group may still be consumed.

        Args:
            oldest: update of the group's oldest behaviour policy.
            trainer: update of the trainer at the take in question.

        Returns:
            0 if it is this take or none, negative if it is too old already.
        """
        return (self.max_staleness - (trainer - oldest)) // self.updates_per_collection
