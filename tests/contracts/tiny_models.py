"""Random models and a byte-level tokenizer, made locally: nothing comes from a hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCAB = 261
EOS = 258
CONTEXT = 4096

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64,
    "max_position_embeddings": CONTEXT, "eos_token_id": EOS, "pad_token_id": 256,
    "bos_token_id": None,
    # Spread logits, so that wrong weights, masks or positions show in a log-prob.
    "initializer_range": 0.3,
}  # fmt: skip


def tiny_qwen3(seed: int, **sizes: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, **sizes}, tie_word_embeddings=True)).eval()


def tiny_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)).eval()


def byte_tokenizer() -> Tokenizer:
    """256 byte symbols without merges, and five special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>"]
    )
    return tokenizer


def save_model(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def reference_logprobs(
    model: Any, prompt: list[int], output: list[int], *, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of ``output`` after ``prompt`` by one HF forward: float32 [len(output)]."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *output]])).logits[0].float() / temperature
    logprob_TV = torch.log_softmax(logits, dim=-1)
    at = torch.arange(len(prompt) - 1, len(prompt) + len(output) - 1)
    return logprob_TV[at, torch.tensor(output, dtype=torch.int64)]


def reference_after_swap(
    old: Any, new: Any, prompt: list[int], output: list[int], swap: int
) -> torch.Tensor:
    """Log-probs of ``output[swap:]`` when ``new`` goes on over the KV that ``old`` left.

    The newest token has no KV yet when weights change, so ``new`` computes it.
    """
    with torch.inference_mode():
        left = old(torch.tensor([[*prompt, *output[: swap - 1]]]), use_cache=True)
        name = "cache" if hasattr(left, "cache") else "past_key_values"
        cache = getattr(left, name)
        logits = new(torch.tensor([output[swap - 1 :]]), **{name: cache}, use_cache=True).logits[0]
    logprob_TV = torch.log_softmax(logits[:-1].float(), dim=-1)
    return logprob_TV.gather(1, torch.tensor(output[swap:])[:, None]).squeeze(1)
