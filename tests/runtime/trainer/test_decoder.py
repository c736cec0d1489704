"""Layers called from here give what the model's own forward pass gives, bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from runtime.trainer.packing import Unit
from runtime.trainer.torch.decoder import Rotations
from runtime.trainer.torch.layout import PackedRow, pack_row
from runtime.trainer.torch.scorer import PackedScorer, load_scorer
from tests.runtime.trainer.tiny import make_sequences, tiny_config

SIZES: dict[str, Any] = {
    k: v for k, v in tiny_config().to_dict().items() if k not in ("layer_types", "model_type")
} | {"architectures": None}
KINDS: dict[str, tuple[type, type, bool]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, True),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, True),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, True),
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, True),
    "mistral": (MistralConfig, MistralForCausalLM, False),  # not known: by its own forward pass
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def a_row(seed: int, longest: int = 9) -> PackedRow:
    sequences = make_sequences(seed, groups=3, samples=2, longest=longest)
    bins = [Unit(s.prompt_len, ((i, len(s.logprobs)),)) for i, s in enumerate(sequences)]
    return pack_row(bins, sequences, torch.device("cpu"))


def both(scorer: PackedScorer, row: PackedRow) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Hidden states and the whole gradient: of the walk, and of transformers."""
    walks = scorer.decoder.walks
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for way in (walks, False):
        scorer.decoder.walks = way
        hidden_TD = scorer.decoder(row)
        hidden_TD.float().square().sum().backward()
        grads = [p.grad.flatten().float() for p in scorer.parameters() if p.grad is not None]
        found.append((hidden_TD.detach(), torch.cat(grads)))
        scorer.zero_grad()
    scorer.decoder.walks = walks
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_walk_is_the_models_forward_pass(kind: str, tmp_path: Path) -> None:
    make_config, make_model, is_known = KINDS[kind]
    more = MOE if kind == "qwen3-moe" else {}
    more |= {"sliding_window": None} if kind == "mistral" else {}
    torch.manual_seed(0)
    make_model(make_config(**(SIZES | more))).save_pretrained(tmp_path)
    scorer = load_scorer(
        str(tmp_path), temperature=1.0, chunk=64, activation_checkpointing=True,
        joint_projections=kind == "qwen3",
    ).to(torch.bfloat16 if kind == "llama" else torch.float32)  # fmt: skip
    assert scorer.decoder.walks is is_known
    (walked, by_walk), (wanted, by_wanted) = both(scorer, a_row(1))
    assert torch.equal(walked, wanted)
    assert torch.equal(by_walk, by_wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_kept_rotations_are_the_models(rope: dict[str, Any], dtype: torch.dtype) -> None:
    """Also where rows become longer, and longer than the model was made for."""
    told = {"rope_parameters": {"rope_theta": 10_000.0} | rope, "max_position_embeddings": 64}
    module = Qwen3ForCausalLM(tiny_config(**told)).model.rotary_emb
    apart = Qwen3ForCausalLM(tiny_config(**told)).model.rotary_emb
    rotations, like = Rotations(module), torch.zeros(1, dtype=dtype)
    for longest in (3, 9, 40, 200, 5):
        row = a_row(3, longest)
        wanted = apart(like, row.position_T[None])
        for got, want in zip(rotations.of(row, like), wanted, strict=True):
            assert got.dtype == dtype
            assert torch.equal(got, want)
