"""Qwen3-shaped models small enough for one core, and plain sampling from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from runtime.recipes.byte_tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE

# Legend: B prompts, P prompt tokens (all prompts of a call have the same length), N new tokens.


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Qwen3 model with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int


SHAPES = {
    "300k": Shape(96, 3, 3, 1, 32, 256),
    "1m": Shape(128, 4, 4, 2, 32, 512),
    "5m": Shape(256, 6, 8, 4, 32, 768),
}


def new_model(shape: Shape, *, seed: int) -> Qwen3ForCausalLM:
    """Build a model with random fp32 weights; the global random state is left as it was."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.mlp,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """What ``sample`` drew, one entry per prompt; the end token is included where it came."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    """Natural log, at the sampling temperature."""


@torch.no_grad()
def sample(
    model: Qwen3ForCausalLM,
    prompt_BP: torch.Tensor,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    ignore_end: bool = False,
) -> Responses:
    """Sample one response per row with transformers' own ``generate``.

    Args:
        model: any causal model of this recipe.
        prompt_BP: int64 [B, P], unpadded.
        max_new_tokens: a response without an end token is cut here.
        temperature: 0 takes the most likely token (its log-prob is then at temperature 1).
        seed: same seed, same weights, same prompts: same responses.
        ignore_end: never draw the end token; log-probs are still those of the whole vocabulary.
    """
    greedy = temperature == 0
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=not greedy,
        min_new_tokens=max_new_tokens if ignore_end else None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        return_dict_in_generate=True,
        output_logits=True,
        **({} if greedy else {"temperature": temperature, "top_k": 0, "top_p": 1.0}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        generator: Any = model  # its mixin declares a self that no model fits
        out = generator.generate(
            input_ids=prompt_BP,
            attention_mask=torch.ones_like(prompt_BP),
            generation_config=config,
        )
    new_BN = out.sequences[:, prompt_BP.shape[1] :]
    logits_BNV = torch.stack(out.logits, dim=1).float() / (1.0 if greedy else temperature)
    logprob_BN = logits_BNV.log_softmax(-1).gather(-1, new_BN.unsqueeze(-1)).squeeze(-1)
    lengths = [max_new_tokens] * len(new_BN) if ignore_end else _lengths(new_BN)
    return Responses(
        token_ids=[row[:n] for row, n in zip(new_BN.tolist(), lengths, strict=True)],
        logprobs=[row[:n] for row, n in zip(logprob_BN.tolist(), lengths, strict=True)],
    )


def _lengths(new_BN: torch.Tensor) -> list[int]:
    ended_BN = (new_BN == EOS_ID).int().cumsum(1)
    before_or_at_end = (ended_BN == 0).sum(1) + (ended_BN[:, -1] > 0).int()
    return before_or_at_end.tolist()
