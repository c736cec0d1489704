"""A task that costs what a real one costs and teaches nothing: for the benchmarks on GPUs.

A Qwen3-shaped model with random weights, prompts of random letters, responses that run to their
cap, and a reward that is a coin. ``make`` writes model, prompts and run file; ``of_preset`` what
the preset for one GPU needs, and says what to set in it.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEMPLATE_TOKENS = 2
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
    },
    "4b": {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
    },
}
PRESET = Path(__file__).parents[1] / "configs" / "presets" / "one-gpu.toml"
COIN = f"{__name__}:coin"


def coin(response: str, answer: object, metadata: object) -> float:
    """A verifier: a coin that falls the same way for the same response."""
    return float(zlib.crc32(response.encode("utf-8", "replace")) % 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run of a benchmark."""

    shape: str = "0.6b"
    engine_python: str
    """Interpreter of SGLang's environment; empty: the embedded engine."""
    gpus: int = 1
    """0: everything on CPU."""
    engines: int = 1
    tensor: int = 1
    colocated: bool = True
    transport: str = "ipc"
    mode: str = "refresh"
    groups: int = 8
    samples: int = 8
    prompt_tokens: int = 128
    response_tokens: int = 256
    updates: int = 20
    max_staleness: int = 1
    compile: bool = False
    sleep: bool = False
    max_gap: float = 0.02
    """Limit of the agreement contract, a mean of |log-prob of engine - of trainer|."""
    engine_args: dict[str, str | int | float | bool] = field(
        default_factory=dict[str, "str | int | float | bool"]
    )
    env: dict[str, str] = field(default_factory=dict[str, str])


GPU_ARGS: dict[str, str | int | float | bool] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_prefill_cuda_graph": True,
    "cuda_graph_max_bs_decode": 256,
}
"""Of SGLang 0.5.17 without its larger kernel packages."""


def make_model(folder: Path, shape: str, seed: int = 1) -> Path:
    """An HF folder with random weights and the byte tokenizer; bf16, float32 when tiny."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from runtime.recipes.byte_tokenizer import EOS_ID, PAD_ID, byte_tokenizer

    if folder.exists():
        return folder
    torch.manual_seed(seed)
    sizes: dict[str, Any] = SHAPES[shape]
    made: Any = Qwen3Config  # its declared parameters leave out what it takes
    config = made(
        **sizes, rope_theta=1e6, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=EOS_ID, pad_token_id=PAD_ID,
    )  # fmt: skip
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16 if shape != "tiny" else torch.float32)
    model.generation_config.eos_token_id = EOS_ID
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def model_apart(folder: Path, shape: str) -> Path:
    """As ``make_model``, in a process of its own: what watches a run holds no memory of its GPU."""
    code = f"from benchmarks.gpu_task import *; make_model(Path({str(folder)!r}), {shape!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    return folder


def make(folder: Path, task: Task, *, name: str) -> Path:
    """Everything of one run below ``folder``; returns the run file."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model_apart(folder.parent / f"model-{task.shape}", task.shape)
    make_prompts(folder / "train.jsonl", task.groups * (task.updates + 8), task.prompt_tokens)
    run_file = folder / "run.toml"
    run_file.write_text(_run_file(folder, model, task, name))
    return run_file


def make_prompts(path: Path, count: int, tokens: int, seed: int = 0) -> Path:
    """Prompts of random letters, each of ``tokens`` tokens with its template."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            text = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=tokens - TEMPLATE_TOKENS))
            file.write(json.dumps({"prompt": text, "answer": ""}) + "\n")
    return path


def of_preset(folder: Path, task: Task) -> list[str]:
    """What a user of ``PRESET`` sets in it: paths, lengths, the number of updates, the verifier.

    All else is as shipped; on a CPU, where nothing can be shared, also what says GPU.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {
        "model.path": str(model_apart(folder.parent / f"model-{task.shape}", task.shape)),
        "data.train": str(make_prompts(folder / "train.jsonl", 4096, task.prompt_tokens)),
        "data.max_prompt_tokens": task.prompt_tokens,
        "evaluation.sets.math.prompts": str(
            make_prompts(folder / "test.jsonl", 256, task.prompt_tokens, seed=1)
        ),
        "rollout.max_response_tokens": task.response_tokens,
        "reward.verifier": COIN,
        "core.max_updates": task.updates,
        "output.root": str(folder / "run"),
        "launch.detached": True,
    }
    if task.engine_python:
        values["rollout.engine_python"] = task.engine_python
    if task.gpus == 0:
        values |= {
            "model.dtype": "float32",
            "rollout.engine": "sglang" if task.engine_python else "embedded",
            "rollout.engine_args": task.engine_args,
            "rollout.colocated": False,
            "launch.gpus_per_replica": 0,
        }
    return [f"{key} = {_toml(value)}" for key, value in values.items()]


def _run_file(folder: Path, model: Path, task: Task, name: str) -> str:
    on_gpu = task.gpus > 0
    args = {**(GPU_ARGS if on_gpu and task.engine_python else {}), **task.engine_args}
    if task.tensor > 1:
        # Its own all-reduce asks for NVLink multicast, which a shared host may not allow.
        args["disable_custom_all_reduce"] = True
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "dtype": "bfloat16" if on_gpu else "float32"},
        "data": {
            "train": str(folder / "train.jsonl"),
            "max_prompt_tokens": task.prompt_tokens,
        },
        "rollout": {
            "engine": "sglang" if task.engine_python else "embedded",
            **({"engine_python": task.engine_python} if task.engine_python else {}),
            "engine_args": args,
            "engines": task.engines,
            "tensor": task.tensor,
            "colocated": task.colocated and on_gpu,
            "sleep": task.sleep and on_gpu,
            "max_running_requests": 256,
            "groups_per_collection": task.groups,
            "samples_per_prompt": task.samples,
            "max_response_tokens": task.response_tokens,
        },
        "async": {"max_staleness": task.max_staleness},
        "reward": {"verifier": COIN},
        "core": {
            "loss": "dapo",
            "eps_clip_high": 0.2,
            "lr": 1e-6,
            "activation_checkpointing": False,
            "compile": task.compile,
            "max_tokens_per_gpu": 16384,
            "publication_mode": task.mode,
            "publication_transport": task.transport,
            "max_mean_logprob_gap": task.max_gap,
            "max_updates": task.updates,
        },
        "checkpoint": {"every_updates": 1000},
        "evaluation": {"final": False},
        "output": {"root": str(folder / "run"), "export_hf": False},
        "tracking": {"mode": "disabled"},
        "launch": {"detached": True, "gpus_per_replica": task.gpus},
    }
    lines = [f'name = "{name}"', "seed = 1"]
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    if task.env:
        lines += ["[launch.env]", *(f"{key} = {_toml(value)}" for key, value in task.env.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    return json.dumps(value)
