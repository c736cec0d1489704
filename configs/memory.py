"""What a model's state takes, from its shape: what is certain, not a promise of fit."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from configs.model import DType
from configs.run import RunSpec
from configs.shape import ModelShape
from configs.topology import Topology

BYTES: dict[DType, int] = {"bfloat16": 2, "float32": 4}
_FP32 = 4


class MemoryEstimate(BaseModel):
    """Bytes of state. Activations, logits, workspaces and fragmentation come on top."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parameters: int
    weights_bytes: int
    """Whole model in `model.dtype`."""
    master_bytes: int
    """fp32 master copy; 0 where the weights are fp32 themselves."""
    moments_bytes: int
    """Both moments of AdamW, fp32."""
    trainer_bytes_per_rank: int
    """Weights, gradients, master and moments of one rank, and its share of a reference policy."""
    staged_bytes_per_node: int
    """Host memory of one staged copy: what a commit writes."""
    engine_weights_bytes_per_gpu: int
    """Weights of one engine on each of its devices; the rest is KV."""
    kv_bytes_per_token: int
    """Keys and values of one token in one engine replica."""
    assumptions: list[str]


def estimate_memory(spec: RunSpec, shape: ModelShape, topology: Topology) -> MemoryEstimate:
    """State of trainer and engines.

    Optimizer state is spread over all trainer ranks on GPUs (FSDP2, Megatron's distributed
    optimizer) and held whole by every rank on CPU.
    """
    parameters = shape.num_parameters
    per_value = BYTES[spec.model.dtype]
    master = 0 if per_value == _FP32 else parameters * _FP32
    moments = 2 * parameters * _FP32
    on_gpu = topology.trainer_gpus > 0
    optimizer_ranks = topology.trainer_ranks if on_gpu else 1
    # Gradients as large as the weights; a reference policy is weights alone.
    copies = 3 if spec.core.uses_reference else 2
    resident = copies * per_value * _parameters_per_rank(spec, shape, topology)
    staged = (master or parameters * per_value) + moments
    nodes = max(1, -(-topology.trainer_gpus // max(1, topology.gpus_per_replica)))
    return MemoryEstimate(
        parameters=parameters,
        weights_bytes=parameters * per_value,
        master_bytes=master,
        moments_bytes=moments,
        trainer_bytes_per_rank=int(resident + (master + moments) / optimizer_ranks),
        staged_bytes_per_node=staged // nodes,
        engine_weights_bytes_per_gpu=parameters * per_value // spec.rollout.tensor,
        kv_bytes_per_token=shape.kv_bytes_per_token(per_value),
        assumptions=[
            "optimizer state spread over all trainer ranks" if on_gpu else "every CPU rank whole",
            "activations, logits and workspaces are not in it",
        ],
    )


def _parameters_per_rank(spec: RunSpec, shape: ModelShape, topology: Topology) -> float:
    if topology.trainer_gpus == 0:
        return shape.num_parameters
    if spec.core.backend == "torch":
        return shape.num_parameters / topology.trainer_ranks
    experts = shape.layers * shape.experts * 3 * shape.hidden * shape.expert_mlp
    dense = (shape.num_parameters - experts) / topology.tensor
    return (dense + experts / topology.expert) / topology.pipeline


def memory_warnings(
    spec: RunSpec, estimate: MemoryEstimate, gpu_memory: int | None, topology: Topology
) -> list[str]:
    """Where the state alone does not fit what the cluster or the file gives."""
    warnings: list[str] = []
    if gpu_memory is not None and topology.trainer_gpus > 0:
        shared = estimate.engine_weights_bytes_per_gpu if topology.colocated else 0
        for who, need in (
            ("trainer", estimate.trainer_bytes_per_rank + shared),
            ("engine", estimate.engine_weights_bytes_per_gpu),
        ):
            if need > gpu_memory:
                warnings.append(
                    f"memory: the {who}'s state takes {gib(need)} of a GPU's {gib(gpu_memory)}"
                )
    host = spec.launch.memory
    # A commit may be staged while the one before it is still being written.
    if host is not None and estimate.staged_bytes_per_node > host:
        warnings.append(
            f"launch.memory {gib(host)} is below one staged copy, "
            f"{gib(estimate.staged_bytes_per_node)} a node"
        )
    return warnings


def gib(num_bytes: int) -> str:
    """``12.3 GiB``, or MiB below one."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
