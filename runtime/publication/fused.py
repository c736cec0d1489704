"""HF weights as SGLang holds them: q, k, v in one tensor, gate and up in one, shards per rank.

Needed to know what such an engine's digests must be. Weights come as a stream; a part waits until
its siblings have come, which in every export is within the same layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from runtime.errors import ContractViolation, UnavailableFeature

_FUSED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "k_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "v_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
    "up_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
}
_BY_ROWS = frozenset({"qkv_proj", "gate_up_proj", "embed_tokens", "lm_head"})
"""Divided over an engine's ranks by output rows; these also hold the vocabulary."""
_BY_COLUMNS = frozenset({"o_proj", "down_proj"})
_VOCABULARY = frozenset({"embed_tokens", "lm_head"})
_PADDED_TO = 64
"""Rows of a vocabulary are filled up with zeros to a multiple of this."""

Named = tuple[str, torch.Tensor]


@dataclass(slots=True)
class Fusing:
    """Turns one export into what an engine of ``tensor`` ranks holds.

    Raises:
        UnavailableFeature: for experts, whose fused form is not known here.
        ContractViolation: if a tensor does not divide by the ranks, or a sibling never came.
    """

    tensor: int = 1
    _waiting: dict[str, dict[str, torch.Tensor]] = field(
        default_factory=dict[str, dict[str, torch.Tensor]]
    )

    def push(self, name: str, tensor: torch.Tensor) -> list[Named]:
        """Take one tensor; whatever is complete by it."""
        path = name.split(".")
        if "experts" in path:
            raise UnavailableFeature(f"not available yet: the engine's form of {name}")
        module = path[-2] if len(path) > 1 else ""
        if module not in _FUSED:
            return self._divide(name, module, [tensor])
        fused, members = _FUSED[module]
        whole = ".".join([*path[:-2], fused, path[-1]])
        parts = self._waiting.setdefault(whole, {})
        parts[module] = tensor
        if len(parts) < len(members):
            return []
        del self._waiting[whole]
        return self._divide(whole, fused, [parts[member] for member in members])

    def finish(self) -> None:
        """Refuse an export that left a fused tensor incomplete."""
        if self._waiting:
            raise ContractViolation(
                f"the export holds only parts of {sorted(self._waiting)[:3]}: nothing can be "
                "compared with what an engine makes of them"
            )

    def _divide(self, name: str, module: str, parts: list[torch.Tensor]) -> list[Named]:
        if module in _VOCABULARY:
            parts = [_padded(part) for part in parts]
        if self.tensor == 1:
            return [(name, torch.cat(parts) if len(parts) > 1 else parts[0])]
        named: list[Named] = []
        for rank in range(self.tensor):
            if module in _BY_ROWS:
                value = torch.cat([self._cut(name, part, 0, rank) for part in parts])
            elif module in _BY_COLUMNS and parts[0].dim() > 1:
                value = self._cut(name, parts[0], 1, rank).contiguous()
            else:
                value = parts[0]
            named.append((f"{rank}/{name}", value))
        return named

    def _cut(self, name: str, tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        if tensor.shape[dim] % self.tensor:
            raise ContractViolation(f"{name}: {tuple(tensor.shape)} on {self.tensor} ranks")
        size = tensor.shape[dim] // self.tensor
        return tensor.narrow(dim, rank * size, size)


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    missing = -tensor.shape[0] % _PADDED_TO
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])
