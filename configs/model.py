"""`[model]`: what is trained."""

from __future__ import annotations

from typing import Literal

from configs.section import RunPath, Section

DType = Literal["bfloat16", "float32"]


class Model(Section):
    """The model, its tokenizer and its chat template. Exactly one of `path` and `recipe`."""

    path: RunPath | None = None
    """Folder of a Hugging Face model (config.json, safetensors, tokenizer)."""
    recipe: Literal["laptop"] | None = None
    """Make a small model and its tokenizer locally instead: `laptop` is a Qwen3 shape of 300k
    parameters."""
    tokenizer: RunPath | None = None
    """Folder of the tokenizer; absent: the model's own."""
    chat_template: RunPath | None = None
    """File with a Jinja chat template; absent: the tokenizer's own."""
    dtype: DType = "bfloat16"
    """Precision of the forward pass and of what the engines serve; the optimizer keeps fp32."""
