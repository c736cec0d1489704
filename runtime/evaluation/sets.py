"""What an evaluation asks: the same prompts, sampling and seeds every time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from configs import evaluation as section
from runtime.engines.protocol import SamplingSettings

Kind = Literal["cadence", "final"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """One named set."""

    name: str
    prompts: Path | None
    """File of prompts; None where ``recipe`` makes them."""
    recipe: str | None
    num_prompts: int | None
    """The first so many; None: all."""
    verifier: str
    samples: int
    """Per prompt."""
    pass_at: int
    """Largest k of pass@k that is reported; at most ``samples``."""
    sampling: SamplingSettings
    """Without a seed of its own: each sample gets ``sample_seed``."""
    seed: int
    required: bool | None
    """None: required for the final evaluation only."""

    def __post_init__(self) -> None:
        if (self.prompts is None) == (self.recipe is None):
            raise ValueError(f"evaluation set {self.name}: give prompts or recipe, not both")
        if not 1 <= self.pass_at <= self.samples:
            raise ValueError(
                f"evaluation set {self.name}: pass_at {self.pass_at} of {self.samples} samples"
            )

    @classmethod
    def from_config(
        cls,
        name: str,
        given: section.EvaluationSet,
        *,
        verifier: str,
        max_response_tokens: int,
        stop: tuple[str, ...] = (),
        stop_token_ids: tuple[int, ...] = (),
    ) -> EvaluationSet:
        """Read ``[evaluation.sets.NAME]``.

        Args:
            name: of the set.
            given: its section.
            verifier: ``reward.verifier``, where the set names none.
            max_response_tokens: ``rollout.max_response_tokens``, where the set says nothing.
            stop: stop words of the run.
            stop_token_ids: stop tokens of the model.
        """
        return cls(
            name=name,
            prompts=None if given.prompts is None else Path(given.prompts),
            recipe=given.recipe,
            num_prompts=given.num_prompts,
            verifier=given.verifier or verifier,
            samples=given.samples,
            pass_at=given.pass_at,
            sampling=SamplingSettings(
                temperature=given.temperature,
                top_p=given.top_p,
                max_new_tokens=given.max_response_tokens or max_response_tokens,
                stop=stop,
                stop_token_ids=stop_token_ids,
            ),
            seed=given.seed,
            required=given.required,
        )

    def is_required(self, kind: Kind) -> bool:
        """Whether a missing result leaves the run outstanding."""
        return kind == "final" if self.required is None else self.required

    def digest(self, *, prompts_fingerprint: str, verifier_version: str = "") -> str:
        """Identity of what is asked: 64 hex digits. Results compare only where it is equal.

        Args:
            prompts_fingerprint: of the frozen prompts, so that a path plays no part.
            verifier_version: as ``prepared/`` records it.
        """
        asked: Mapping[str, object] = {
            "prompts": prompts_fingerprint,
            "num_prompts": self.num_prompts,
            "verifier": [self.verifier, verifier_version],
            "samples": self.samples,
            "pass_at": self.pass_at,
            "sampling": asdict(self.sampling),
            "seed": self.seed,
        }
        text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def sample_seed(self, index: int, sample: int = 0) -> int:
        """Seed of one sample of one prompt, in [0, 2**31): the same in every evaluation.

        Args:
            index: row of the prompt in the frozen file.
            sample: which of its samples, from 0.
        """
        text = f"{self.seed}:{index}:{sample}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
