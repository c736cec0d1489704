"""`[evaluation]`: sets of prompts, and when they are run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.section import PositiveSeconds, RunPath, Section

SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]


class EvaluationSet(Section):
    """`[evaluation.sets.NAME]`: the same prompts and seeds every time. `prompts` or `recipe`."""

    prompts: RunPath | None = None
    """JSONL or Parquet file with the fields of `[data]`."""
    recipe: Literal["laptop"] | None = None
    """Held-out prompts of a recipe."""
    num_prompts: int | None = Field(default=None, ge=1)
    """Take the first so many; absent: all."""
    verifier: str | None = None
    """Verifier of this set; absent: `reward.verifier`."""
    samples: int = Field(default=1, ge=1)
    """Samples per prompt."""
    pass_at: int = Field(default=1, ge=1)
    """k of pass@k, unbiased; at most `samples`."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off."""
    max_response_tokens: int | None = Field(default=None, ge=1)
    """Longest response; absent: `rollout.max_response_tokens`."""
    seed: int = Field(default=0, ge=0)
    """Seed of its samples."""
    required: bool | None = None
    """A missing result leaves the run outstanding. Absent: the final evaluation only."""


class Evaluation(Section):
    """When the sets are run, and where."""

    every_updates: int | None = Field(default=None, ge=1)
    """Updates between evaluations; each commits first. Absent: only the final one."""
    mode: Literal["shared", "background"] = "shared"
    """On the rollout engines behind the admission gate, or as a run of its own."""
    final: bool = True
    """Evaluate the actual last update when the run ends."""
    overflow: Literal["wait", "skip"] = "wait"
    """What a third background evaluation in flight does; a required or final one always waits."""
    deadline: PositiveSeconds = 3600.0
    """Total limit of one evaluation, or one try of it in the background, with its retries."""
    sets: dict[SetName, EvaluationSet] = Field(default={})
    """The sets, by name."""
