"""trl's GRPOTrainer on the model, data and numbers of ``bare_loop``: the other side of P1.

trl is no dependency of the project. Give it an environment of its own::

    python3 -m venv /tmp/trl && /tmp/trl/bin/pip install trl==1.16.0 datasets transformers torch
    python -m benchmarks.trl_side --python /tmp/trl/bin/python --seed 0 --out trl-0.json

This file is both halves: without ``--inside`` it makes the recipe's folder with our interpreter
and starts itself with the other one, which imports nothing of the project. JSON as ``bare_loop``
prints it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import contextlib
import io
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STARTED_CPU, STARTED = time.process_time(), time.perf_counter()


def outside(args: argparse.Namespace) -> None:
    """Make model and data, then let the other interpreter train."""
    from benchmarks.bare_loop import CASES
    from runtime.recipes import laptop

    case = CASES[args.case]
    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        made = laptop.make(
            Path(folder) / "laptop",
            seed=args.seed,
            shape=case.shape,
            warm_up_until=case.warm_up_until,
        )
        told = {
            "model": str(made.model),
            "train": str(made.train),
            "scratch": str(Path(folder) / "trl"),
            "seed": args.seed,
            "updates": args.updates,
            "stop": args.stop,
            "prompts": case.prompts,
            "samples": case.samples,
            "max_new_tokens": case.max_new_tokens,
            "fixed_length": case.fixed_length,
            "lr": case.lr,
            "warmup_updates": case.warmup_updates,
            "warm_up_cpu_s": time.process_time() - begun,
        }
        done = subprocess.run(
            [args.python, __file__, "--inside", json.dumps(told)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=args.deadline,
        )
    text = done.stdout.strip().splitlines()[-1]
    if args.out:
        args.out.write_text(text + "\n")
    else:
        print(text)


def inside(told: dict[str, Any]) -> None:
    """Train with trl; one JSON line on the real stdout."""
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(told["model"], dtype=torch.float32)
    rows = [json.loads(line) for line in Path(told["train"]).read_text().splitlines()]
    messages = [
        {"prompt": [{"role": "user", "content": r["prompt"]}], "answer": r["answer"]} for r in rows
    ]
    curve: list[tuple[int, float, float, float]] = []
    ends: list[tuple[float, float]] = []
    seconds = {"generation": 0.0}

    def exact(completions: Any, answer: Any, **_: Any) -> list[float]:
        judged = [
            float(c[0]["content"].strip() == a) for c, a in zip(completions, answer, strict=True)
        ]
        cpu, wall = time.process_time() - STARTED_CPU, time.perf_counter() - STARTED
        curve.append((len(curve) + 1, statistics.fmean(judged), cpu, wall))
        return judged

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends.append((time.process_time(), time.perf_counter()))
            last = [row[1] for row in curve[-10:]]
            if len(last) == 10 and statistics.fmean(last) >= told["stop"]:
                control.should_training_stop = True

    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=exact,
        args=trl.GRPOConfig(**_config(told)),
        train_dataset=Dataset.from_list(messages),
        processing_class=AutoTokenizer.from_pretrained(told["model"], padding_side="left"),
        callbacks=[Stop()],
    )
    generate = trainer._generate_single_turn

    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.process_time()
        result = generate(*args, **kwargs)
        seconds["generation"] += time.process_time() - begun
        return result

    trainer._generate_single_turn = timed
    begun_cpu, begun = time.process_time(), time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    cpu = [b[0] - a[0] for a, b in itertools.pairwise(ends)]
    wall = [b[1] - a[1] for a, b in itertools.pairwise(ends)]
    result = {
        "side": f"trl {trl.__version__}",
        "case": told,
        "seed": told["seed"],
        "updates": len(ends),
        "reached_0_9": _reached(curve, 0.9),
        "reached_stop": _reached(curve, told["stop"], window=10),
        "warm_up_cpu_s": told["warm_up_cpu_s"],
        "cpu_s": told["warm_up_cpu_s"] + time.process_time() - STARTED_CPU,
        "train_cpu_s": time.process_time() - begun_cpu,
        "train_wall_s": time.perf_counter() - begun,
        "generation_cpu_s": seconds["generation"],
        "cpu_s_per_update_median": statistics.median(cpu) if cpu else None,
        "wall_s_per_update_median": statistics.median(wall) if wall else None,
        "machine": {
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
        },
        "curve": curve,
    }
    print(json.dumps(result))


def _config(told: dict[str, Any]) -> dict[str, Any]:
    """GRPOConfig; what is not named here keeps trl's default (dapo loss, group std, clip 0.2)."""
    config: dict[str, Any] = {
        "output_dir": told["scratch"],
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "gradient_checkpointing": False,  # trl's default is on, and costs a fifth here
        "per_device_train_batch_size": told["prompts"] * told["samples"],
        "gradient_accumulation_steps": 1,
        "num_generations": told["samples"],
        "max_completion_length": told["max_new_tokens"],
        "temperature": 1.0,
        "beta": 0.0,
        "learning_rate": told["lr"],
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": told["warmup_updates"],
        "adam_beta2": 0.99,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "max_steps": told["updates"],
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "seed": told["seed"],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    if told["fixed_length"]:
        config["generation_kwargs"] = {"min_new_tokens": told["max_new_tokens"]}
    return config


def _reached(
    curve: list[tuple[int, float, float, float]], level: float, window: int = 5
) -> dict[str, float] | None:
    # Twin of bare_loop.reached: this half runs where the project cannot be imported.
    for i in range(window, len(curve) + 1):
        if statistics.fmean(row[1] for row in curve[i - window : i]) >= level:
            update, _, cpu_s, wall_s = curve[i - 1]
            return {"update": update, "cpu_s": cpu_s, "wall_s": wall_s}
    return None


def main() -> None:
    """Read the command line and run the half that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has trl")
    parser.add_argument("--case", choices=("a", "b"), default="a")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=400, help="at most")
    parser.add_argument("--stop", type=float, default=0.95)
    parser.add_argument("--deadline", type=float, default=1800.0, help="seconds for trl's half")
    parser.add_argument("--out", type=Path, help="write the JSON there instead of printing it")
    args = parser.parse_args()
    if args.inside:
        inside(json.loads(args.inside))
    else:
        outside(args)


if __name__ == "__main__":
    main()
