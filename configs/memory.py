"""What a model takes in memory, from its shape: state, and the activations of a packed row."""

from __future__ import annotations

from fnmatch import fnmatchcase

from pydantic import BaseModel, ConfigDict

from configs.model import DType
from configs.run import RunSpec
from configs.shape import ModelShape
from configs.topology import Topology

BYTES: dict[DType, int] = {"bfloat16": 2, "float32": 4}
_FP32 = 4
_EMBEDDING = "model.embed_tokens.weight"
_KEPT_LOGITS = 5 << 30
"""As ``runtime.trainer.torch.head`` keeps them on a GPU."""


class MemoryEstimate(BaseModel):
    """Bytes of state, and of a step's activations. Workspaces and fragmentation come on top."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parameters: int
    weights_bytes: int
    """Whole model in `model.dtype`."""
    master_bytes: int
    """fp32 master copy; 0 where the weights are fp32 themselves."""
    moments_bytes: int
    """What the optimizer keeps beside the masters, fp32: both moments of AdamW, one momentum."""
    trainer_bytes_per_rank: int
    """Weights, gradients, master and moments of one rank, and its share of a reference policy."""
    activation_bytes_per_rank: int
    """What the passes over one full packed row hold at their peak: activations and logits."""
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
    moments = _moments(spec, shape, parameters) * _FP32
    on_gpu = topology.trainer_gpus > 0
    optimizer_ranks = topology.trainer_ranks if on_gpu else 1
    trained = _adapter_parameters(spec, shape) or parameters
    if trained != parameters:
        master = trained * _FP32 if master else 0
        moments = _moments(spec, shape, trained) * _FP32
    # A reference policy and a teacher are weights alone; the base serves adapters as reference.
    is_held = spec.core.uses_reference and (trained == parameters or spec.core.reference)
    has_teacher = spec.teacher is not None and spec.teacher.path is not None
    frozen = 1 + bool(is_held) + has_teacher
    # Gradients as large as what trains.
    per_rank = _parameters_per_rank(spec, shape, topology)
    resident = per_value * per_rank * (frozen + trained / parameters)
    staged = (master or trained * per_value) + moments
    nodes = max(1, -(-topology.trainer_gpus // max(1, topology.gpus_per_replica)))
    return MemoryEstimate(
        parameters=parameters,
        weights_bytes=parameters * per_value,
        master_bytes=master,
        moments_bytes=moments,
        trainer_bytes_per_rank=int(resident + (master + moments) / optimizer_ranks),
        activation_bytes_per_rank=_activations(spec, shape, per_value),
        staged_bytes_per_node=staged // nodes,
        engine_weights_bytes_per_gpu=_served(spec, shape) * per_value // spec.rollout.tensor,
        kv_bytes_per_token=shape.kv_bytes_per_token(per_value),
        assumptions=[
            *_shared_rows(topology),
            "optimizer state spread over all trainer ranks" if on_gpu else "every CPU rank whole",
            "the teacher is as large as the student" if has_teacher else "no teacher",
            "the engine keeps its base beside what it serves"
            if spec.lora.publishes_adapter
            else "the engine holds the weights once",
            "activations of the torch backend, layers compiled; workspaces are not in it",
        ],
    )


def _shared_rows(topology: Topology) -> list[str]:
    ranks = topology.context
    return [f"tokens of a row in equal parts on {ranks} ranks"] if ranks > 1 else []


def _served(spec: RunSpec, shape: ModelShape) -> int:
    """Values an engine keeps of the model; where adapters are merged there, most of them twice."""
    tables = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    kept = shape.num_parameters - tables if spec.lora.publishes_adapter else 0
    return shape.num_parameters + kept


def _moments(spec: RunSpec, shape: ModelShape, trained: int) -> int:
    """Values that the optimizer keeps of so many trained ones; vectors count as matrices."""
    core = spec.core
    if core.optimizer == "sgd":
        return trained if core.settled_momentum > 0 else 0
    if core.optimizer == "muon":
        is_whole = trained == shape.num_parameters
        tables = shape.vocab * shape.hidden * (1 if shape.tied else 2) if is_whole else 0
        return trained + tables
    return 2 * trained


def _adapter_parameters(spec: RunSpec, shape: ModelShape) -> int:
    """Parameters of all adapters, and of an embedding beside them; 0 without."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    widths = {
        "q_proj": shape.hidden + queries,
        "k_proj": shape.hidden + keys,
        "v_proj": shape.hidden + keys,
        "o_proj": queries + shape.hidden,
        "gate_proj": shape.hidden + shape.mlp,
        "up_proj": shape.hidden + shape.mlp,
        "down_proj": shape.mlp + shape.hidden,
    }
    width = sum(widths.get(target, 0) for target in spec.lora.targets)
    of_layers = spec.lora.rank * shape.layers * width
    has_embedding = any(fnmatchcase(_EMBEDDING, pattern) for pattern in spec.lora.also)
    return of_layers + (shape.vocab * shape.hidden if has_embedding and spec.lora.rank else 0)


def _activations(spec: RunSpec, shape: ModelShape, per_value: int) -> int:
    """Of `max_tokens_per_gpu` tokens of a row on a GPU, as the torch backend keeps them.

    A layer keeps two norms' inputs and the residual, the joint q, k, v, the rotated q and k, the
    attention's output, the joint gate and up, and their product. Recomputed layers keep their input
    alone, and one layer at a time is whole. Logits wait for the backward pass, up to 5 GiB.

    A row may have `context` times as many tokens; its ranks have an equal share of them, or of the
    heads over all of them, which is as much. Attention then keeps q, k and v as exchanged and its
    output both ways, and one exchange at a time holds what it sends and what it gets.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    mlp = shape.experts_per_token * shape.expert_mlp if shape.is_moe else shape.mlp
    attention = (queries + 2 * keys) + (queries + keys) + queries
    is_shared = spec.core.context > 1
    exchanged = 2 * (queries + 2 * keys) if is_shared else 0
    attention += queries + keys if is_shared else 0
    layer = 3 * shape.hidden + attention + 3 * mlp
    kept = layer * shape.layers
    if spec.core.activation_checkpointing:
        kept = shape.hidden * shape.layers + layer
    tokens = spec.core.max_tokens_per_gpu
    logits = min(tokens * shape.vocab * per_value, _KEPT_LOGITS)
    return tokens * (kept + exchanged) * per_value + logits


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
            (
                "trainer",
                estimate.trainer_bytes_per_rank + estimate.activation_bytes_per_rank + shared,
            ),
            ("engine", estimate.engine_weights_bytes_per_gpu),
        ):
            if need > gpu_memory:
                warnings.append(f"memory: the {who} takes {gib(need)} of a GPU's {gib(gpu_memory)}")
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
