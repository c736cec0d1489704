"""A model and collections small enough for a test."""

import numpy as np
from transformers import Qwen3Config

from runtime.trainer.protocol import Sequence

VOCAB = 61


def tiny_config(**changes: object) -> Qwen3Config:
    sizes: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 3,
        "pad_token_id": 0,
        "initializer_range": 0.3,
    }
    return Qwen3Config(**(sizes | changes))


def make_sequences(
    seed: int, *, groups: int = 4, samples: int = 3, longest: int = 9, equal: tuple[int, ...] = ()
) -> tuple[Sequence, ...]:
    rng = np.random.default_rng(seed)
    made: list[Sequence] = []
    for group in range(groups):
        prompt = rng.integers(4, VOCAB, int(rng.integers(1, 8)))
        for _ in range(samples):
            n = int(rng.integers(1, longest + 1))
            response = rng.integers(4, VOCAB, n)
            made.append(
                Sequence(
                    tokens=np.concatenate([prompt, response]).astype(np.int32),
                    prompt_len=len(prompt),
                    logprobs=rng.normal(-4.0, 0.3, n).astype(np.float32),
                    mask=(rng.random(n) < 0.85).astype(np.float32),
                    advantage=0.0 if group in equal else float(rng.normal()),
                    span_ends=np.array([n], np.int32),
                    span_updates=np.array([-1], np.int32),  # of no policy that is ever current
                    prefill_update=-1,
                    group=group,
                    is_equal=group in equal,
                )
            )
    return tuple(made)
