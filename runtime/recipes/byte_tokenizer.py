"""A tokenizer of 261 entries: the bytes, no merges, five special tokens, a two-token template."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD_ID = 256
EOS_ID = 258
VOCAB_SIZE = 261

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>")

# A prompt costs its content plus two tokens; ChatML would cost eighteen around a one-letter prompt.
_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}<|im_end|>"
    "{% else %}<|user|>{{ m['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer; the same every time.

    Ids 0..255 are the bytes in the order of the byte-level alphabet, 256 ``<|endoftext|>`` (pad),
    257 ``<|im_start|>``, 258 ``<|im_end|>`` (end of a response), 259 ``<|user|>``,
    260 ``<|assistant|>``.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def prompt_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token ids of one user message, ready for a response."""
    messages = [{"role": "user", "content": text}]
    # transformers declares a return type for every combination of options at once.
    encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return list(encoded["input_ids"])
