"""The trainer driven by a plain loop: no engine, no session, no Ray. Anchor of P1 and P3.

Real parts: the laptop recipe, the torch trainer behind LocalGroup, group advantages. Plain parts:
transformers' own ``generate`` samples from the trainer's weights, and exact match judges in line.

    python -m benchmarks.bare_loop --seed 0 --out bare-0.json   # (a) the laptop task
    python -m benchmarks.bare_loop --case b --updates 12        # (b) 4.8 M, 8 x 8 x 32 tokens

One torch thread. Stops at a mean reward of ``--stop`` over the last ten updates. Prints one JSON
object; ``curve`` holds [update, mean reward, CPU seconds, wall seconds] of every update.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import platform
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch
import transformers
from transformers import Qwen3ForCausalLM

from runtime.recipes import laptop
from runtime.recipes.byte_tokenizer import byte_tokenizer, prompt_ids
from runtime.recipes.reverse_task import Question
from runtime.recipes.tiny_model import sample
from runtime.recipes.warm_up import exact_match
from runtime.trainer.advantages import group_advantages, is_equal_group
from runtime.trainer.local import LocalGroup
from runtime.trainer.protocol import Sequence, TrainBatch
from runtime.trainer.settings import LossSettings, OptimizerSettings, TrainerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of P1. ``trl_side`` holds the same numbers."""

    shape: str
    prompts: int
    samples: int
    max_new_tokens: int
    fixed_length: bool
    """Responses go on to ``max_new_tokens`` whatever they say."""
    warm_up_until: float | None
    lr: float = 5e-4
    warmup_updates: int = 10


CASES = {
    "a": Case(
        shape="300k",
        prompts=32,
        samples=8,
        max_new_tokens=6,
        fixed_length=False,
        warm_up_until=0.2,
    ),
    "b": Case(
        shape="5m",
        prompts=8,
        samples=8,
        max_new_tokens=32,
        fixed_length=True,
        warm_up_until=None,
    ),
}


def trainer_settings(case: Case, seed: int) -> TrainerSettings:
    """The optimizer and loss of the laptop task (spec of P1)."""
    return TrainerSettings(
        loss=LossSettings.named("dapo", eps_clip_high=0.2, max_response_tokens=case.max_new_tokens),
        optimizer=OptimizerSettings(
            lr=case.lr, warmup_updates=case.warmup_updates, beta2=0.99, max_grad_norm=1.0
        ),
        max_tokens_per_bin=16384,
        seed=seed,
    )


class PlainSampler:
    """A second copy of the model that takes over the trainer's weights before it samples."""

    def __init__(self, made: laptop.Laptop, case: Case, seed: int) -> None:
        self.model = Qwen3ForCausalLM.from_pretrained(made.model, dtype=torch.float32).eval()
        self.tokenizer = byte_tokenizer()
        self._case = case
        self._seed = seed

    def take(self, weights: dict[str, torch.Tensor]) -> None:
        """Copy weights by name."""
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)

    def collect(
        self, questions: list[Question], update: int
    ) -> tuple[tuple[Sequence, ...], list[float]]:
        """Sample one group per question and judge it; sequences and all rewards."""
        case = self._case
        prompts = [prompt_ids(self.tokenizer, q.prompt) for q in questions]
        tensor = torch.tensor([p for p in prompts for _ in range(case.samples)])
        drawn = sample(
            self.model,
            tensor,
            max_new_tokens=case.max_new_tokens,
            temperature=1.0,
            seed=self._seed * 1_000_003 + update,
            ignore_end=case.fixed_length,
        )
        texts = self.tokenizer.batch_decode(drawn.token_ids, skip_special_tokens=True)
        sequences: list[Sequence] = []
        rewards: list[float] = []
        for g, question in enumerate(questions):
            at = slice(g * case.samples, (g + 1) * case.samples)
            judged = [float(text.strip() == question.answer) for text in texts[at]]
            rewards += judged
            advantages = group_advantages(judged)
            for tokens, logprobs, advantage in zip(
                drawn.token_ids[at], drawn.logprobs[at], advantages, strict=True
            ):
                sequences.append(
                    Sequence(
                        tokens=np.array(prompts[g] + tokens, np.int32),
                        prompt_len=len(prompts[g]),
                        logprobs=np.array(logprobs, np.float32),
                        mask=np.ones(len(tokens), np.float32),
                        advantage=float(advantage),
                        span_ends=np.array([len(tokens)], np.int32),
                        span_updates=np.array([update - 1], np.int32),
                        prefill_update=update - 1,
                        group=g,
                        is_equal=is_equal_group(judged),
                    )
                )
        return tuple(sequences), rewards


async def run(case: Case, *, seed: int, updates: int, stop: float, folder: Path) -> dict[str, Any]:
    """Make the model, train to ``stop`` or ``updates``, report."""
    started_cpu, started = time.process_time(), time.perf_counter()
    made = laptop.make(
        folder / "laptop", seed=seed, shape=case.shape, warm_up_until=case.warm_up_until
    )
    warm_cpu = time.process_time() - started_cpu
    questions = [Question(**json.loads(line)) for line in made.train.read_text().splitlines()]
    trainer = LocalGroup(trainer_settings(case, seed))
    await trainer.load(str(made.model))
    sampler = PlainSampler(made, case, seed)
    curve: list[tuple[int, float, float, float]] = []
    cpu: dict[str, list[float]] = {"update": [], "generation": [], "training": []}
    wall: list[float] = []
    gap = 0.0
    for update in range(1, updates + 1):
        begun, begun_wall = time.process_time(), time.perf_counter()
        at = (update - 1) * case.prompts
        asked = [questions[(at + i) % len(questions)] for i in range(case.prompts)]
        sampler.take({n: t for b in trainer.backend.export_weights(1 << 30) for n, t in b})
        sequences, rewards = sampler.collect(asked, update)
        sampled = time.process_time()
        batch = TrainBatch(update=update, sequences=sequences, consumed_digest=str(update))
        metrics = await trainer.train_step(batch)
        ended = time.process_time()
        gap = max(gap, metrics.values["agreement/gap_mean"])
        cpu["update"].append(ended - begun)
        cpu["generation"].append(sampled - begun)
        cpu["training"].append(ended - sampled)
        wall.append(time.perf_counter() - begun_wall)
        curve.append(
            (update, statistics.fmean(rewards), ended - started_cpu, time.perf_counter() - started)
        )
        last = [row[1] for row in curve[-10:]]
        if len(last) == 10 and statistics.fmean(last) >= stop:
            break
    holdout = [Question(**json.loads(line)) for line in made.holdout.read_text().splitlines()]
    sampler.take({n: t for b in trainer.backend.export_weights(1 << 30) for n, t in b})
    greedy = exact_match(sampler.model, sampler.tokenizer, holdout, temperature=0.0, seed=seed)
    await trainer.shutdown()
    return {
        "side": "milepost bare loop",
        "case": asdict(case),
        "seed": seed,
        "updates": len(curve),
        "reached_0_9": reached(curve, 0.9),
        "reached_stop": reached(curve, stop, window=10),
        "warm_up_steps": made.record.warm_up_steps,
        "warm_up_cpu_s": warm_cpu,
        "cpu_s": time.process_time() - started_cpu,
        "wall_s": time.perf_counter() - started,
        **{f"cpu_s_per_{k}_median": statistics.median(v[1:] or v) for k, v in cpu.items()},
        "wall_s_per_update_median": statistics.median(wall[1:] or wall),
        "worst_mean_logprob_gap": gap,
        "holdout_greedy": greedy,
        "machine": machine(),
        "curve": curve,
    }


def reached(
    curve: list[tuple[int, float, float, float]], level: float, window: int = 5
) -> dict[str, float] | None:
    """First update whose mean over the last ``window`` is at ``level``; None if there is none."""
    for i in range(window, len(curve) + 1):
        if statistics.fmean(row[1] for row in curve[i - window : i]) >= level:
            update, _, cpu_s, wall_s = curve[i - 1]
            return {"update": update, "cpu_s": cpu_s, "wall_s": wall_s}
    return None


def machine() -> dict[str, object]:
    """What a figure must say about where it was taken."""
    return {
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Read the command line, run, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=sorted(CASES), default="a")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=400, help="at most")
    parser.add_argument("--stop", type=float, default=0.95)
    parser.add_argument("--out", type=Path, help="write the JSON there instead of printing it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        call = partial(
            run,
            CASES[args.case],
            seed=args.seed,
            updates=args.updates,
            stop=args.stop,
            folder=Path(folder),
        )
        result = anyio.run(call)
    text = json.dumps(result, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
