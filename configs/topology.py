"""How a run's GPUs, or CPU ranks, are divided between trainer, engines and judges."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from configs.run import RunSpec


class Topology(BaseModel):
    """Who gets which share. Counts are GPUs, except `trainer_ranks` and `engines`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    replicas: int
    gpus_per_replica: int
    """0: CPU only."""
    trainer_ranks: int
    """Processes that train: one per GPU, or CPU ranks."""
    data: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    trainer_gpus: int
    engines: int
    engine_gpus: int
    """All engines together; 0 on CPU."""
    judge_gpus: int
    colocated: bool
    idle_gpus: int

    @property
    def total_gpus(self) -> int:
        """GPUs the run asks for."""
        return self.replicas * self.gpus_per_replica

    @property
    def gpus_per_rank(self) -> float:
        """Of one trainer rank; half a GPU where an engine has the other half."""
        if not self.trainer_gpus:
            return 0.0
        return 0.5 if self.colocated else 1.0

    @property
    def gpus_per_engine(self) -> float:
        """Of one engine, all its ranks together."""
        if not self.engine_gpus:
            return 0.0
        return 0.5 if self.colocated else self.engine_gpus / self.engines


def model_parallel(spec: RunSpec) -> int:
    """Ranks that hold one copy of the model together: tensor x pipeline x context."""
    return spec.core.tensor * spec.core.pipeline * spec.core.context


def judge_gpus(spec: RunSpec) -> int:
    """GPUs of managed judges."""
    judge = spec.reward.judge
    return judge.gpus * judge.replicas if judge is not None and judge.managed else 0


def trainer_gpus(spec: RunSpec) -> int:
    """What engines and judges leave to the trainer; negative in a file that is refused."""
    total = spec.launch.replicas * spec.launch.gpus_per_replica - judge_gpus(spec)
    engines = spec.rollout.engines * spec.rollout.tensor
    return total if spec.rollout.colocated else total - engines


def divide(spec: RunSpec) -> Topology:
    """Shares of a run that passed the layout rules."""
    has_gpus = spec.launch.gpus_per_replica > 0
    share = trainer_gpus(spec) if has_gpus else 0
    parallel = model_parallel(spec)
    data = spec.core.data or (max(1, share // parallel) if has_gpus else 1)
    used = data * parallel
    return Topology(
        replicas=spec.launch.replicas,
        gpus_per_replica=spec.launch.gpus_per_replica,
        trainer_ranks=used,
        data=data,
        tensor=spec.core.tensor,
        pipeline=spec.core.pipeline,
        context=spec.core.context,
        expert=spec.core.expert,
        trainer_gpus=used if has_gpus else 0,
        engines=spec.rollout.engines,
        engine_gpus=spec.rollout.engines * spec.rollout.tensor if has_gpus else 0,
        judge_gpus=judge_gpus(spec),
        colocated=spec.rollout.colocated,
        idle_gpus=share - used if has_gpus else 0,
    )
