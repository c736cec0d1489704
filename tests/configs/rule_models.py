"""Settings and model shapes that tests of rules share."""

from __future__ import annotations

GPUS = ("launch.gpus_per_replica = 8",)
MOUNTED = ('launch.mounts = ["/"]',)
MODEL = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
}
MOE = MODEL | {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
