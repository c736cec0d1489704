"""Token ids to text, without torch: the session reads texts, it never tokenises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

Decode = Callable[[Sequence[int]], str]


def load_decoder(folder: Path) -> Decode:
    """The decoder of an HF tokenizer folder, special tokens left out.

    Reads ``tokenizer.json`` where there is one; only older tokenizers need transformers.
    """
    fast = folder / "tokenizer.json"
    if fast.is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(fast))

        def decode(token_ids: Sequence[int]) -> str:
            return tokenizer.decode(list(token_ids), skip_special_tokens=True)

        return decode
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )

    def decode_slowly(token_ids: Sequence[int]) -> str:
        return str(slow.decode(list(token_ids), skip_special_tokens=True))

    return decode_slowly
