"""Shape of a model, from its config.json: counts that plan arithmetic needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self, cast

from pydantic import BaseModel, ConfigDict

from configs.model import Model


class ModelShape(BaseModel):
    """Sizes of a decoder-only transformer, dense or MoE."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    """Width of a dense layer's MLP."""
    vocab: int
    tied: bool
    """Input and output embeddings are one tensor."""
    experts: int = 0
    """0: dense."""
    expert_mlp: int = 0
    """Width of one expert."""
    experts_per_token: int = 0

    @property
    def is_moe(self) -> bool:
        """The model has experts."""
        return self.experts > 0

    @property
    def num_parameters(self) -> int:
        """Parameters, norms included; biases are not counted (these families have none)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        norms = 2 * self.hidden + 2 * self.head_dim
        if self.is_moe:
            mlp = self.experts * 3 * self.hidden * self.expert_mlp + self.hidden * self.experts
        else:
            mlp = 3 * self.hidden * self.mlp
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.hidden + self.layers * (attention + norms + mlp)

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Read what a Hugging Face config.json says.

        Raises:
            KeyError: if a size is missing that cannot be derived.
        """
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        mlp = int(config["intermediate_size"])
        return cls(
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            mlp=mlp,
            vocab=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            experts=int(experts),
            expert_mlp=int(config.get("moe_intermediate_size") or (mlp if experts else 0)),
            experts_per_token=int(config.get("num_experts_per_tok") or 0),
        )


LAPTOP = ModelShape(
    hidden=96, layers=3, heads=3, kv_heads=1, head_dim=32, mlp=256, vocab=261, tied=True
)
"""What the laptop recipe makes."""


def read_shape(model: Model) -> ModelShape | None:
    """Shape of a run's model; None where its config.json is not here, or is of an unknown kind."""
    if model.recipe is not None:
        return LAPTOP
    if model.path is None:
        return None
    return read_config(model.path / "config.json")


def read_config(path: Path) -> ModelShape | None:
    """Shape in a config.json; None where it cannot be read as one."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            return None
        table = cast("dict[str, Any]", config)
        inner = table.get("text_config")
        return ModelShape.from_config(cast("dict[str, Any]", inner) if inner else table)
    except (OSError, ValueError, KeyError, TypeError):
        # A shape is a help for the plan; whether the model loads is checked where it is loaded.
        return None
