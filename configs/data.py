"""`[data]`: the prompts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.section import RunPath, Section


class Data(Section):
    """Training prompts. Exactly one of `train` and `recipe`."""

    train: RunPath | None = None
    """JSONL or Parquet file, one prompt a row; frozen into the output root before training."""
    recipe: Literal["laptop"] | None = None
    """Make the prompts locally instead: `laptop` asks to reverse strings of four letters."""
    prompt_field: str = "prompt"
    """Field with the prompt: a text, or a list of chat messages."""
    answer_field: str = "answer"
    """Field with the reference answer; rows without it have none."""
    verifier_field: str | None = None
    """Field that names the verifier of a row; absent: `reward.verifier` judges all rows."""
    apply_chat_template: bool = True
    """Wrap prompts in the chat template with a generation prompt; false: take them as they are."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest templated prompt; a longer row is an error at `prepare`, with its number."""
    shuffle: bool = True
    """Another order in every pass over the data, drawn from `seed`; false: file order."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the data; the run ends with them unless `core.max_updates` ends it first."""
