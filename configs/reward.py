"""`[reward]`: how responses are judged."""

from __future__ import annotations

from pydantic import Field

from configs.section import PositiveSeconds, RunPath, Scalar, Section


class CodeReward(Section):
    """`[reward.code]`: the code service that runs tests."""

    url: str
    """Address of the service."""
    time_limit: PositiveSeconds = 10.0
    """Limit of one test run inside the service."""
    concurrency: int = Field(default=32, ge=1)
    """Requests to the service at the same time."""


class JudgeReward(Section):
    """`[reward.judge]`: a model that judges. Exactly one of `url` and `managed = true`."""

    url: str | None = None
    """Address of a judge that runs already."""
    managed: bool = False
    """Start engines of our own for the judge, with the attempt."""
    model: RunPath | None = None
    """Model of a managed judge."""
    gpus: int = Field(default=1, ge=1)
    """GPUs of one replica of a managed judge."""
    replicas: int = Field(default=1, ge=1)
    """Replicas of a managed judge."""
    template: RunPath | None = None
    """File with the judge's prompt; absent: the built-in one."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest verdict."""
    concurrency: int = Field(default=64, ge=1)
    """Requests to the judge at the same time."""


class Reward(Section):
    """The verifier, its limits, and the shaping of overlong responses."""

    verifier: str | None = None
    """`exact_match`, `math`, `multiple_choice`, `instructions`, `code`, `judge`, `http`, or
    `module:name`. Absent only with OPD: no rewards."""
    arguments: dict[str, Scalar] = Field(default={})
    """Keyword arguments of the verifier."""
    batched: bool = False
    """An import-path verifier takes a whole group at once."""
    url: str | None = None
    """Address of the `http` verifier."""
    time_limit: PositiveSeconds = 10.0
    """Limit of one verification; past it the worker is killed and the response tried once more."""
    workers: int = Field(default=2, ge=1, le=256)
    """Verifier processes."""
    skip_budget: float = Field(default=0.0, ge=0, le=1)
    """Share of the prompts that may be skipped because their verification failed twice."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """Overlong shaping: the penalty grows over this many last tokens before the cap; 0 is off."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Reward taken from a response that reaches the cap."""
    code: CodeReward | None = None
    """The code service."""
    judge: JudgeReward | None = None
    """The judge."""
