"""`[rollout]` and `[async]`: how responses are generated, and how far ahead of the trainer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from configs.section import (
    IMPORT_PATH,
    ImportPath,
    PositiveSeconds,
    RunPath,
    Scalar,
    Section,
    Texts,
    refuse,
)


def _filter(value: object) -> object:
    if value in ("off", "equal_rewards") or (
        isinstance(value, str) and IMPORT_PATH.fullmatch(value)
    ):
        return value
    raise refuse("no such filter", allowed='"off", "equal_rewards" or "package.module:name"')


class Rollout(Section):
    """Serving engines, sampling, and the groups a collection consists of."""

    engine: Literal["embedded", "sglang"] = "embedded"
    """Serving engine: `embedded` runs anywhere, `sglang` needs its own environment."""
    engine_python: RunPath | None = None
    """Python of the environment the engine runs in; absent: the run's own."""
    engine_args: dict[str, Scalar] = Field(default={})
    """Further arguments of the engine server, as its command line names them without dashes. Those
    that other fields decide are refused."""
    engine_start_deadline: PositiveSeconds = 600.0
    """Longest start of an engine, kernels that are compiled for the first time included."""
    engines: int = Field(default=1, ge=1)
    """Engine replicas."""
    tensor: int = Field(default=1, ge=1)
    """GPUs of one engine replica (tensor parallel)."""
    colocated: bool = False
    """Engines share the trainer's GPUs instead of having their own. The engine's part of the
    memory is then said by `engine_args.mem_fraction_static`."""
    sleep: bool = False
    """Colocated engines give their GPU memory back while the trainer makes an update; what they
    were generating goes on with the new policy."""
    max_running_requests: int = Field(default=256, ge=1)
    """Serving slots of one engine: samples it decodes at the same time."""
    groups_per_collection: int = Field(default=32, ge=1)
    """Groups the trainer consumes at once."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Samples of one prompt; at least 2 wherever the loss uses the group mean."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature, above 0; the trainer scores at the same one."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off. Below 1 it conflicts with `core.tis`."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample among the k likeliest tokens; -1 is off. It conflicts with `core.tis`."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Drop tokens below this share of the likeliest one; 0 is off. It conflicts with `core.tis`."""
    seed: int | None = Field(default=None, ge=0)
    """Of sampling: what a sample draws follows from it, the prompt and the sample's number, in
    every attempt alike, where the engine can; absent: each attempt draws anew."""
    max_response_tokens: int = Field(default=1024, ge=1)
    """Longest response, stop token included."""
    stop: Texts = ()
    """Texts that end a response, beside the model's own end tokens."""
    filter: Annotated[str, BeforeValidator(_filter)] = "off"
    """Dynamic sampling: `equal_rewards` rejects groups without a gradient; or `module:name`."""
    filter_max_rounds: int = Field(default=10, ge=1)
    """Collections' worth of groups a filter may reject in a row before the run fails."""
    waiting_deadline: PositiveSeconds = 600.0
    """Longest wait of a request before an engine starts it."""
    running_deadline: PositiveSeconds = 1800.0
    """Longest generation of a request once started."""
    drain_deadline: PositiveSeconds = 600.0
    """Longest wait for admitted calls when admission closes; stragglers are requeued."""
    engine_watchdog_timeout: PositiveSeconds = 300.0
    """The watchdog inside the engine; never stretched by the infrastructure multiplier."""
    function: ImportPath | None = None
    """Multi-turn rollout function as `module:name`; absent: one answer to one prompt."""


class Async(Section):
    """How far generation may run ahead of training."""

    async_max_concurrent_samples: int | None = Field(default=None, ge=1)
    """Samples in flight. Absent: the larger of a collection and twice the serving slots, in whole
    groups, within the staleness bound."""
    max_staleness: int = Field(default=4, ge=0)
    """Most updates between a group's oldest token and the trainer that takes it; 0: in step."""
    buffer_collections: int = Field(default=1, ge=1)
    """Finished collections the buffer holds before generation is held back."""
    unused_groups: Literal["requeue"] = "requeue"
    """What becomes of finished groups nobody consumed: their prompts go back to the queue."""
