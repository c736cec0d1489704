"""P10: the torch trainer alone on one GPU, 0.6 B Qwen3 shape, 8 x 2048 packed tokens.

Whole ``train_step`` and ``score`` calls are timed, host work, contracts and metrics included,
against an 8192^3 bf16 product measured before and after. Model FLOP of a step: 6 N T for the linear
layers (N parameters without the embedding look-up, the output layer in, T tokens) and 6 L heads
head_size sum(S^2) for causal attention (L layers, S the lengths); a scoring pass is a third of it.

    python -m benchmarks.bench_trainer --out p10.json
    python -m benchmarks.bench_trainer --cases packed,torch,mixed,mixed-torch --out p10.json
    python -m benchmarks.bench_trainer --cases variants --steps 8 --out variants.json

Cases named ``torch`` run without kernels of other libraries (``runtime.trainer.torch.cute``).
The case ``variants`` times other ways to score and to step in turn with the trainer's own, and says
where the GPU stands idle in a call (``trainer_variants``, ``trainer_timeline``).

Beside it: agreement with the plain transformers forward pass, the stall of ``stage`` against a copy
to pinned memory (P6), and where the GPU's time goes. ``--tiny`` tries the script itself, on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.trainer_timeline import timeline
from benchmarks.trainer_variants import Variants, gap, in_turn
from runtime.trainer.protocol import Sequence, StagedState, TrainBatch
from runtime.trainer.settings import LossSettings, TrainerSettings
from runtime.trainer.torch.backend import TorchTrainer

MIXED: tuple[int, ...] = (2237, 3529, 419, 1679, 1271, 3760, 1827, 1662)
"""Lengths of a batch with a long tail, 16384 tokens."""

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention", ("cudnn", "fmha", "flash", "sdpa")),
    ("matrix products", ("nvjet", "gemm", "cutlass", "cublas", "xmma", "splitk")),
    ("output layer: softmax and gradient", ("_row_stats", "_row_gradient")),
    ("optimizer: clip, step, round", ("_adamw", "multi_tensor", "fusedadam")),
    ("norm and rotation of q and k", ("_rotate_",)),
    ("gated activation", ("_gated",)),
    ("compiled: norms, residual", ("triton_",)),
    ("embedding", ("embedding", "sort", "radix", "unique")),
    ("copies", ("memcpy", "memset", "copy")),
    (
        "elementwise and reductions",
        ("elementwise", "reduce", "index", "scatter", "fill", "catarray"),
    ),
)


def model_config(*, tiny: bool) -> Qwen3Config:
    """The shape of P10, or one to try the script with."""
    sizes: dict[str, Any] = {
        "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 3072, "max_position_embeddings": 40960,
    }  # fmt: skip
    if tiny:
        sizes |= {
            "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
        }  # fmt: skip
    return Qwen3Config(
        **sizes, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0
    )


def flop_of_pass(config: Qwen3Config, lengths: list[int]) -> float:
    """Model FLOP of one forward pass; a training step is three times that."""
    heads, keys = config.num_attention_heads, int(config.num_key_value_heads or 0)
    wide = config.head_dim * (2 * heads + 2 * keys) * config.hidden_size
    layer = wide + 3 * config.hidden_size * config.intermediate_size
    linear = config.num_hidden_layers * layer + config.hidden_size * config.vocab_size
    pairs = sum(length * length for length in lengths)
    attention = 2.0 * config.num_hidden_layers * heads * config.head_dim * pairs
    return 2.0 * linear * sum(lengths) + attention


def make_sequences(
    lengths: list[int], vocab: int, *, prompt: int = 1, siblings: int = 1
) -> tuple[Sequence, ...]:
    """Sequences whose ``length`` tokens are fed to the model; all behind the prompt are targets."""
    rng = np.random.default_rng(3)
    made: list[Sequence] = []
    for at, length in enumerate(lengths):
        group = at // siblings
        start = np.random.default_rng(group).integers(2, vocab, prompt)
        response = rng.integers(2, vocab, length - prompt + 1)
        made.append(
            Sequence(
                tokens=np.concatenate([start, response]).astype(np.int32),
                prompt_len=prompt,
                logprobs=np.zeros(len(response), np.float32),
                mask=np.ones(len(response), np.float32),
                advantage=float(rng.normal()),
                span_ends=np.array([len(response)], np.int32),
                span_updates=np.zeros(1, np.int32),
                prefill_update=0,
                group=group,
                is_equal=False,
            )
        )
    return tuple(made)


def synchronise() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(action: Callable[[], object], rounds: int) -> list[float]:
    """Milliseconds of each call, in order, the GPU's work included."""
    found: list[float] = []
    for _ in range(rounds):
        synchronise()
        start = time.perf_counter()
        action()
        synchronise()
        found.append((time.perf_counter() - start) * 1e3)
    return found


def summary(ms: list[float]) -> dict[str, float]:
    """Median and range."""
    return {
        "ms": round(statistics.median(ms), 2),
        "min": round(min(ms), 2),
        "max": round(max(ms), 2),
        "rounds": len(ms),
    }


def matmul_rate(device: str, size: int, rounds: int = 20) -> float:
    """FLOP/s of a square bf16 product on random data: median of ``rounds`` after 5."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    ms = timed(lambda: a @ b, rounds + 5)[5:]
    return 2 * size**3 / statistics.median(ms) * 1e3


class Bench:
    """One model folder, several ways to train it."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self.folder = folder
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.config = model_config(tiny=arguments.tiny)
        self.lengths = [16] * 4 if arguments.tiny else [2048] * 8
        self.ceiling = 0.0
        self.facts: dict[str, object] = {}
        """Of the last trainer loaded, and how long that took: kernels are checked in it."""

    def make_model(self) -> None:
        """Random weights, written as a model folder."""
        torch.manual_seed(1)
        with torch.device(self.device):
            model: Any = Qwen3ForCausalLM(self.config)
        model.to(torch.bfloat16)
        model.save_pretrained(self.folder)

    def trainer(self, **changes: Any) -> TorchTrainer:
        """A loaded trainer with fresh compiled graphs and an empty GPU."""
        torch.compiler.reset()
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        settings = TrainerSettings(
            loss=LossSettings.named("dapo"),
            dtype="bfloat16",
            compile=self.device == "cuda",
            max_tokens_per_bin=sum(self.lengths) + 64,  # each response's last token is not fed
            max_mean_logprob_gap=100.0,  # the same responses for every update: they age
        )
        made = TorchTrainer(replace(settings, **changes))
        (took,) = timed(lambda: self.facts.update(made.load(str(self.folder))), 1)
        self.facts["load_s"] = round(took / 1e3, 2)
        return made

    def case(self, name: str) -> dict[str, Any]:
        """Cold start, steps, scoring pass and memory of one case."""
        vocab = self.config.vocab_size
        lengths = self.lengths
        if name.startswith("mixed") and not self.arguments.tiny:
            lengths = list(MIXED)
        siblings, prompt = (4, lengths[0] // 2) if name == "shared" else (1, 1)
        sequences = make_sequences(lengths, vocab, prompt=prompt, siblings=siblings)
        changes: dict[str, Any] = {"compile": False} if name == "eager" else {}
        if name == "checkpointed":
            changes["activation_checkpointing"] = True
        if name.endswith("torch"):
            changes["kernels"] = "torch"
        one = self.trainer(**changes)
        (cold,) = timed(lambda: one.score(sequences, temperature=1.0), 1)
        scores = one.score(sequences, temperature=1.0)
        sequences = tuple(replace(s, logprobs=p) for s, p in zip(sequences, scores, strict=True))
        timed(lambda: one.score(sequences, temperature=1.0), 3)
        score, beside_score = self.interleaved(lambda: one.score(sequences, temperature=1.0))

        def step() -> dict[str, float]:
            batch = TrainBatch(update=one.update + 1, sequences=sequences, consumed_digest="")
            return one.train_step(batch).values

        (cold_step,) = timed(step, 1)
        first = timed(step, 3)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        train, beside = self.interleaved(step)
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else 0.0
        values = step()
        flop = flop_of_pass(self.config, lengths)
        found: dict[str, Any] = {
            "case": name,
            "cute": self.facts["cute"],
            "load_s": self.facts["load_s"],
            "step": summary(train) | {"all": [round(ms, 1) for ms in train]},
            "score": summary(score),
            "step_over_matmul": round(3 * flop / statistics.median(train) * 1e3 / beside, 4),
            "score_over_matmul": round(flop / statistics.median(score) * 1e3 / beside_score, 4),
            "matmul_beside_step": round(beside / 1e12, 1),
            "matmul_beside_score": round(beside_score / 1e12, 1),
            "step_tflop": round(3 * flop / 1e12, 3),
            "tokens_per_s": round(sum(lengths) / statistics.median(train) * 1e3),
            "peak_gib": round(peak, 2),
            "cold_s": {"score": round(cold / 1e3, 2), "step": round(cold_step / 1e3, 2)},
            "first_steps_ms": [round(ms, 1) for ms in first],
            "values": {k: v for k, v in values.items() if "/" not in k or "elapsed" in k},
        }
        if name in ("packed", "torch"):
            found["profile"] = self.profile(step)
        if name == "packed":
            found["agreement"] = self.agreement(sequences, scores)
            found["stage"] = self.stage(one, step)
        one.stop()
        return found

    def variants(self) -> dict[str, Any]:
        """Ways to score and to step, in turn; figures of the trainer's own way come first."""
        config: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage]
        with config.patch(recompile_limit=64):  # each variant is a graph
            return self._variants()

    def _variants(self) -> dict[str, Any]:
        size = 256 if self.arguments.tiny else 8192
        one = self.trainer()
        sequences = make_sequences(self.lengths, self.config.vocab_size)
        scores = one.score(sequences, temperature=1.0)
        sequences = tuple(replace(s, logprobs=p) for s, p in zip(sequences, scores, strict=True))

        def step() -> dict[str, float]:
            batch = TrainBatch(update=one.update + 1, sequences=sequences, consumed_digest="")
            return one.train_step(batch).values

        timed(step, 2)
        ways = Variants(one, sequences, step, has_gpu=self.device == "cuda")
        flop = flop_of_pass(self.config, self.lengths)
        scoring, wanted = ways.scoring(), ways.score()
        found: dict[str, Any] = {
            "case": "variants",
            "gap_to_now": {name: gap(_tried(call), wanted) for name, call in scoring.items()},
            "timeline": {},
        }
        print(json.dumps(found), flush=True)  # as it comes: a later part may not
        looked_at = {"score": ways.score, "step": step}
        for name, call in looked_at.items():
            made = _tried(partial(timeline, call, group_of))
            found["timeline"][name] = made if isinstance(made, dict) else {"error": repr(made)}
            print(json.dumps({f"timeline {name}": found["timeline"][name]}), flush=True)
        turns = {
            "score": (scoring, flop, 16.0),
            "step": (ways.stepping(), 3 * flop, 14.0),
            "device": ({"recorded graph": ways.replay}, flop, 5.0),  # last: may spoil the rest
        }
        for kind, (calls, cost, budget_s) in turns.items():
            found[kind] = in_turn(
                calls,
                timed,
                lambda: matmul_rate(self.device, size, 10),
                flop=cost,
                rounds=self.arguments.steps,
                budget_s=budget_s,
            )
            print(json.dumps({kind: found[kind]}), flush=True)
        ways.drop_graph()
        one.stop()
        return found

    def interleaved(self, action: Callable[[], object]) -> tuple[list[float], float]:
        """Milliseconds of each call, and the product's rate measured between every four of them.

        A cold GPU multiplies up to 7 % faster than one that has worked for a minute, so an anchor
        from before the case would belong to another machine.
        """
        size = 256 if self.arguments.tiny else 8192
        rates = [matmul_rate(self.device, size, 10)]
        found: list[float] = []
        while len(found) < self.arguments.steps:
            found += timed(action, 4)
            rates.append(matmul_rate(self.device, size, 10))
        return found, statistics.median(rates)

    def profile(self, step: Callable[[], object]) -> dict[str, Any]:
        """GPU time of a step by kernel group, and its share of the wall time of the same steps."""
        found = timeline(step, group_of)
        if found:
            named = sum(ms for name, ms in found["groups_ms"].items() if name != "other")
            found["named_share_of_step"] = round(named / found["wall"], 4)
        return found

    def agreement(self, sequences: tuple[Sequence, ...], scores: Any) -> dict[str, float]:
        """Gap to transformers' own eager forward pass, sequence by sequence, same weights."""
        model: Any = Qwen3ForCausalLM.from_pretrained(
            self.folder, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        model.to(self.device)
        gaps: list[np.ndarray] = []
        for sequence, ours in zip(sequences[:4], scores[:4], strict=True):
            tokens = torch.from_numpy(sequence.tokens.astype(np.int64)).to(self.device)
            with torch.no_grad():
                logits = model(tokens[None, :-1]).logits[0, sequence.prompt_len - 1 :].float()
            chosen = logits.log_softmax(-1).gather(1, tokens[sequence.prompt_len :, None])
            gaps.append(np.abs(chosen.squeeze(1).cpu().numpy() - ours))
        gap = np.concatenate(gaps)
        return {
            "mean": round(float(gap.mean()), 5),
            "max": round(float(gap.max()), 4),
            "tokens": float(gap.size),
        }

    def stage(self, one: TorchTrainer, step: Callable[[], object]) -> dict[str, Any]:
        """P6: what ``stage`` costs against one copy of as many bytes to pinned memory.

        Three figures: the call; the call and an optimizer step that comes at once; a whole update
        right after the call, against one without.
        """
        made: list[StagedState] = []
        settle = one._staging.settle  # pyright: ignore[reportPrivateUsage]
        calls: list[float] = []
        stalls: list[float] = []
        beside: list[float] = []
        size = 0
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(3):  # the first makes the buffers
                (ms,) = timed(lambda: (made.append(one.stage()), settle()), 1)
                calls.append(made[-1].stall_s)
                stalls.append(ms / 1e3)
                size = made[-1].bytes
                one.write_staged(made[-1].token, folder)
            for _ in range(2):
                synchronise()
                made.append(one.stage())
                beside += timed(step, 1)
                one.write_staged(made[-1].token, folder)
        source = torch.empty(size, dtype=torch.uint8, device=self.device)
        target = torch.empty(size, dtype=torch.uint8, pin_memory=self.device == "cuda")
        copy = timed(lambda: target.copy_(source, non_blocking=True), 4)[1:]
        copy_s = statistics.median(copy) / 1e3
        return {
            "bytes": size,
            "call_s": [round(s, 4) for s in calls],
            "stall_at_once_s": [round(s, 4) for s in stalls],
            "step_after_stage_ms": [round(ms, 1) for ms in beside],
            "step_alone_ms": [round(ms, 1) for ms in timed(step, 3)],
            "copy_s": round(copy_s, 4),
            "stall_over_copy": round(statistics.median(stalls[1:]) / copy_s, 2),
            "copy_gb_per_s": round(size / copy_s / 1e9, 1),
        }


def _tried(call: Callable[[], object]) -> object:
    try:
        return call()
    except Exception as exc:  # an experiment; said again where it is timed
        return exc


def group_of(kernel: str) -> str:
    """The group of a kernel, by its name."""
    name = kernel.lower()
    return next((group for group, marks in GROUPS if any(m in name for m in marks)), "other")


def show(found: dict[str, Any]) -> str:
    """The short table."""
    start, end = found["matmul_tflop_per_s"]
    lines = [f"matmul 8192^3: {start} TFLOP/s before, {end} after"]
    for case in found["cases"]:
        if "error" in case:
            lines.append(f"{case['case']:>13}: {case['error'][:300]}")
            continue
        if case["case"] == "variants":
            lines += _show_variants(case)
            continue
        step, score = case["step"], case["score"]
        lines.append(
            f"{case['case']:>13}: step {step['ms']} ms [{step['min']}, {step['max']}] = "
            f"{case['step_over_matmul']}, score {score['ms']} ms = {case['score_over_matmul']}, "
            f"peak {case['peak_gib']} GiB, cold {case['cold_s']}, from cute {case['cute']}"
        )
        lines += [f"{'':>15}{key} {case[key]}" for key in ("agreement", "stage") if key in case]
        profile = case.get("profile")
        if profile:
            idle = {k: profile[k] for k in ("wall", "busy", "idle_inside", "head", "tail")}
            named = profile["named_share_of_step"]
            lines.append(f"{'':>15}{profile['groups_ms']} named {named}, {idle}")
    return "\n".join(lines)


def _show_variants(case: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for kind in ("score", "step", "device"):
        for name, row in case[kind].items():
            away = case["gap_to_now"].get(name) if kind == "score" else None
            lines.append(f"{kind:>7} {name:<26} {row} gap {away}")
    for name, line in case["timeline"].items():
        short = {k: v for k, v in line.items() if k not in ("kernels", "gaps")}
        lines.append(f"timeline {name}: {short}")
        lines += [f"    {kernel}" for kernel in line.get("kernels", [])[:16]]
        lines += [f"    gap {rest}" for rest in line.get("gaps", [])[:5]]
    return lines


def main() -> None:
    """Run the cases; JSON to a file, the short table to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="packed,mixed,shared,eager")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(TrainerSettings().threads)  # as a rank does
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments, Path(folder))
        bench.make_model()
        size = 256 if arguments.tiny else 8192
        bench.ceiling = matmul_rate(bench.device, size)
        cases: list[dict[str, Any]] = []
        for name in arguments.cases.split(","):
            try:
                cases.append(bench.variants() if name == "variants" else bench.case(name))
            except (RuntimeError, ValueError) as exc:
                cases.append({"case": name, "error": f"{type(exc).__name__}: {exc}"})
        rates = (bench.ceiling, matmul_rate(bench.device, size))
    found = {
        "benchmark": "P10",
        "matmul_tflop_per_s": [round(rate / 1e12, 1) for rate in rates],
        "cases": cases,
        "device": torch.cuda.get_device_name() if bench.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(show(found))


if __name__ == "__main__":
    main()
