"""The run file as one value: `RunSpec`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from configs.checkpoint import Checkpoint
from configs.core import Core
from configs.data import Data
from configs.evaluation import Evaluation
from configs.launch import Launch
from configs.lora import Lora
from configs.model import Model
from configs.output import Output, Tracking
from configs.reward import Reward
from configs.rollout import Async, Rollout
from configs.section import Section
from configs.session import Health, Session
from configs.teacher import Teacher


class RunSpec(Section):
    """A run. Sections are attributes; `[async]` is `async_`, since `async` is a word of Python."""

    model_config = ConfigDict(
        validate_by_name=True, validate_by_alias=True, serialize_by_alias=True
    )

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    """Name of the run: lower-case letters, digits, dots, dashes, underscores; at most 63."""
    seed: int = Field(default=0, ge=0)
    """Seed of data order, sampling and initialisation."""
    algorithm: Literal["grpo", "opd"] = "grpo"
    """GRPO, or on-policy distillation from `[teacher]`."""
    model: Model = Model()
    """What is trained."""
    data: Data = Data()
    """The prompts."""
    rollout: Rollout = Rollout()
    """How responses are generated."""
    async_: Async = Field(default=Async(), alias="async")
    """How far generation may run ahead."""
    reward: Reward = Reward()
    """How responses are judged."""
    core: Core = Core()
    """The trainer."""
    lora: Lora = Lora()
    """Adapters."""
    teacher: Teacher | None = None
    """Teacher of OPD."""
    checkpoint: Checkpoint = Checkpoint()
    """Commits."""
    evaluation: Evaluation = Evaluation()
    """Evaluation sets and cadence."""
    output: Output
    """Where results go."""
    tracking: Tracking = Tracking()
    """Metrics."""
    launch: Launch = Launch()
    """The scheduler's side."""
    session: Session = Session()
    """Retries of the session."""
    health: Health = Health()
    """The engine monitor."""
