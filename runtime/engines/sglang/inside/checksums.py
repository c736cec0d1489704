"""Checksums of what a server holds, by HF name: its fused and sharded parameters taken apart.

Both sides of a publication then compare the same thing, whichever way the bytes travelled and
however the server lays them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from runtime.engines.sglang.inside.plugin import wrap
from runtime.engines.sglang.inside.timing import Timing
from runtime.publication.checksum import Checksums
from runtime.publication.mix64 import Tiles, words_of

_AHEAD_BYTES = 2**30
_GATHERED_BYTES = 64 * 1024**2
"""Whole weights that wait for their kernel, in memory that the server left free."""
_NO_COPIES = 2**62
"""What waits for its kernel lies in the model anyway."""
_KEPT = "_milepost_held"

Named = Iterator[tuple[str, torch.Tensor]]


def hook_checksums(checker: Any) -> None:
    """Answer ``/weights_checker`` with checksums by HF name."""

    def make(original: Any) -> Any:
        def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
            model = self._get_model()
            with Timing("checksums"):
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                answer = _empty_answer(checker, self, kwargs)
                answer["checksums"] = model_checksums(model)
            return answer

        return compute

    wrap(checker.WeightChecker, "_compute_checksum", make)


def _empty_answer(checker: Any, instance: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The answer around the checksums, as this version of the server has it."""
    place = {"role": kwargs["role"]} if "role" in kwargs else {}
    info = checker.ChecksumInfo(
        checksums={},
        per_gpu_checksum="",
        parallelism_info=instance._parallelism_info(**place),
    )
    return info.model_dump()


def model_checksums(model: Any) -> dict[str, str]:
    """Checksum of every weight, tied ones once. All ranks call it together."""
    if next(model.parameters()).is_cuda:
        return _on_gpu(model)
    total = sum(parameter.nbytes for _, parameter in model.named_parameters())
    with Checksums(total * world(), _AHEAD_BYTES) as sums:
        for name, tensor in hf_weights(model):
            sums.add(name, tensor)
        return sums.result()


def _on_gpu(model: Any) -> dict[str, str]:
    if world() > 1:
        tiles = Tiles(ahead_bytes=_GATHERED_BYTES)
        for name, tensor in hf_weights(model):
            tiles.add(name, tensor)  # gathered: a whole copy each
        return tiles.result()
    tiles = Tiles(ahead_bytes=_NO_COPIES)
    held = Held.by(model)
    for name, tensor in held.tensors.items():
        words = held.words.get(name)
        if words is None:
            tiles.add(name, tensor)
        else:
            tiles.add_words(name, words)
    return tiles.result()


@dataclass(frozen=True, slots=True)
class Held:
    """Where the weights of a model on one rank lie, by HF name.

    Taking a model apart costs more than hashing it. It is done once and kept with the model, as
    long as each parameter lies where it lay: what was kept keeps its memory, so nothing else can
    lie there.
    """

    lie: list[int]
    """Address of each parameter."""
    tensors: dict[str, torch.Tensor]
    words: dict[str, torch.Tensor]
    """The same memory as ``mix64`` reads it, for those of which it needs no copy."""

    @classmethod
    def by(cls, model: Any) -> Held:
        """What that model holds now."""
        lie = [parameter.data_ptr() for parameter in model.parameters()]
        kept: Held | None = model.__dict__.get(_KEPT)
        if kept is None or kept.lie != lie:
            tensors = dict(hf_weights(model))
            words = {name: words_of(tensor) for name, tensor in tensors.items()}
            views = {n: w for n, w in words.items() if w.data_ptr() == tensors[n].data_ptr()}
            kept = model.__dict__[_KEPT] = cls(lie, tensors, views)
        return kept


def hf_weights(model: Any) -> Named:
    """Every weight as the HF folder has it: whole tensors, one projection each.

    Raises:
        RuntimeError: for a layer whose weights cannot be taken apart.
    """
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        prefix, _, leaf = name.rpartition(".")
        module = modules[prefix]
        take_apart = next(
            (_LAYERS[c.__name__] for c in type(module).__mro__ if c.__name__ in _LAYERS), _whole
        )
        yield from take_apart(module, prefix, leaf, parameter.data)


def _whole(module: Any, prefix: str, leaf: str, data: torch.Tensor) -> Named:
    yield f"{prefix}.{leaf}" if prefix else leaf, data


def _qkv(module: Any, prefix: str, leaf: str, data: torch.Tensor) -> Named:
    sizes = [module.q_proj_shard_size, module.kv_proj_shard_size]
    parts = data.split([*sizes, data.shape[0] - sum(sizes)])
    replicas = (1, module.num_kv_head_replicas, module.num_kv_head_replicas)
    for part, name, copies in zip(parts, ("q_proj", "k_proj", "v_proj"), replicas, strict=True):
        yield f"{_renamed(prefix, 'qkv_proj', name)}.{leaf}", _gathered(part, 0, copies)


def _gate_up(module: Any, prefix: str, leaf: str, data: torch.Tensor) -> Named:
    for part, name in zip(data.chunk(2), ("gate_proj", "up_proj"), strict=True):
        yield f"{_renamed(prefix, 'gate_up_proj', name)}.{leaf}", _gathered(part, 0)


def _column(module: Any, prefix: str, leaf: str, data: torch.Tensor) -> Named:
    yield f"{prefix}.{leaf}", _gathered(data, 0)


def _row(module: Any, prefix: str, leaf: str, data: torch.Tensor) -> Named:
    yield f"{prefix}.{leaf}", _gathered(data, 1) if data.dim() > 1 else data


def _vocabulary(module: Any, prefix: str, leaf: str, data: torch.Tensor) -> Named:
    # Rows behind the vocabulary are padding.
    yield f"{prefix}.{leaf}", _gathered(data, 0)[: module.org_vocab_size]


def _experts(module: Any, prefix: str, leaf: str, data: torch.Tensor) -> Named:
    if leaf == "w13_weight":
        parts = dict(zip(("gate_proj", "up_proj"), data.chunk(2, dim=1), strict=True))
        dim = 1
    elif leaf == "w2_weight":
        parts, dim = {"down_proj": data}, 2
    else:
        raise RuntimeError(f"{prefix}.{leaf} has no HF name")
    whole = {name: _gathered(part, dim) for name, part in parts.items()}
    for expert in range(data.shape[0]):
        for name, tensor in whole.items():
            yield f"{prefix}.{expert}.{name}.weight", tensor[expert]


_LAYERS: dict[str, Callable[[Any, str, str, torch.Tensor], Named]] = {
    "QKVParallelLinear": _qkv,
    "MergedColumnParallelLinear": _gate_up,
    "ColumnParallelLinear": _column,
    "RowParallelLinear": _row,
    "VocabParallelEmbedding": _vocabulary,
    "FusedMoE": _experts,
}
"""By class of the layer, the most special first, as its bases come."""


def _renamed(prefix: str, fused: str, name: str) -> str:
    parent, _, last = prefix.rpartition(".")
    if last != fused:
        raise RuntimeError(f"{prefix} is no {fused}: its parts have no HF names here")
    return f"{parent}.{name}"


def world() -> int:
    """Ranks of this server."""
    return dist.get_world_size() if dist.is_initialized() else 1


def _gathered(part: torch.Tensor, dim: int, copies: int = 1) -> torch.Tensor:
    """Shards of all ranks put together; of ``copies`` ranks that hold the same one, the first.

    Raises:
        RuntimeError: if copies differ.
    """
    if world() == 1:
        return part
    own = part.contiguous()
    shards = [torch.empty_like(own) for _ in range(world())]
    dist.all_gather(shards, own)
    for first in range(0, len(shards), copies):
        if not all(torch.equal(shards[first], shards[first + i]) for i in range(1, copies)):
            raise RuntimeError("ranks that should hold the same heads do not")
    return torch.cat(shards[::copies], dim=dim)
