"""Text to token ids, without torch: only to compare tokenizers, prompts are frozen as ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Encode = Callable[[str, bool], list[int]]
"""``encode(text, special)``: with or without the tokens a tokenizer puts around a text."""


def load_encoder(folder: Path) -> Encode:
    """The encoder of an HF tokenizer folder.

    Reads ``tokenizer.json`` where there is one; only older tokenizers need transformers.
    """
    fast = folder / "tokenizer.json"
    if fast.is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(fast))
        return lambda text, special: tokenizer.encode(text, add_special_tokens=special).ids
    from runtime.data.tokenizer import load_tokenizer

    slow = load_tokenizer(folder)
    return lambda text, special: slow.encode(text, add_special_tokens=special)
