"""Refresh under fire on one GPU: spans and log-probs of every policy, pauses, faults (P4, P5).

Trainer and SGLang share the card; no Ray, no session: the trainer is in this process, so that the
weights of every policy can be kept. A producer keeps ``--concurrency`` responses in flight while
policy after policy is trained and published by ipc. Afterwards spans of each policy are scored
again under its weights. Then publications by transport, tokens/s with and without the producer, and
the faults: requests that would end the server, a killed and a stopped scheduler.

    python -m benchmarks.gpu_refresh --engine-python /opt/sglang/bin/python --out refresh.json

Each part has a limit of time of its own, and what it had found by then is written all the same.
``--cpu`` tries it with a tiny model, without ``--engine-python`` with the embedded engine.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import torch

from benchmarks.gpu_faults import faults
from benchmarks.gpu_home import Home
from benchmarks.gpu_task import GPU_ARGS, make_model
from runtime.data.collections import to_sequences
from runtime.data.ledger import Ledger
from runtime.data.order import PromptOrder
from runtime.data.samples import Collection, Prompt, PromptId
from runtime.engines.protocol import SamplingSettings
from runtime.policy import PolicyId
from runtime.rewards.budget import SkipBudget
from runtime.rollout.functions import SingleTurn
from runtime.rollout.gate import AdmissionGate
from runtime.rollout.parts import ProducerParts
from runtime.rollout.producer import Producer
from runtime.rollout.requests import most_telling
from runtime.rollout.settings import ProducerSettings
from runtime.trainer.advantages import group_advantages
from runtime.trainer.protocol import TrainBatch

LIMIT = 0.02
SCORED = 32
"""Responses scored for each policy: they fit one bin of the trainer's."""
LIMITS_S = {"under_fire": 90, "gaps": 45, "transports": 40, "throughput": 120, "faults": 140}
GRACE_S = 15.0
"""From a part's limit to the end of everything, for one that cannot be cancelled."""

Found = dict[str, Any]
"""Figures of a part, put in as they come."""


class Coin:
    """A judge that costs nothing and tells siblings apart."""

    async def judge(self, prompt: Prompt, texts: list[str]) -> list[float]:
        """Half right."""
        return [float(i % 2) for i in range(len(texts))]


async def under_fire(home: Home, arguments: argparse.Namespace, found: Found) -> None:
    """Train and publish while responses run; what every span says, checked."""
    vocab = home.info.vocab_size
    rng = torch.Generator().manual_seed(2)

    def prompt(prompt_id: PromptId) -> Prompt:
        ids = torch.randint(0, vocab, (arguments.prompt_tokens,), generator=rng).tolist()
        return Prompt(id=prompt_id, token_ids=tuple(ids), text="", answer=None, verifier="coin")

    ledger = Ledger(PromptOrder(100_000, shuffle=False))
    groups = arguments.concurrency // 16
    settings = ProducerSettings(
        epoch=1, vocab_size=vocab, groups_per_collection=groups, samples_per_prompt=8,
        max_concurrent_samples=arguments.concurrency, max_staleness=4,
        sampling=SamplingSettings(max_new_tokens=arguments.tokens, ignore_eos=True),
    )  # fmt: skip
    parts = ProducerParts(
        ledger=ledger, prompt=prompt, pool=home.pool, gate=AdmissionGate(clock=home.clock),
        function=SingleTurn(decode=lambda ids: ""), judge=Coin(), budget=SkipBudget(0.0, 1),
    )  # fmt: skip
    producer = Producer(settings, parts)
    taken: list[Collection] = []
    kept: dict[int, list[torch.Tensor]] = {}
    waits: list[float] = []
    home.seen = (taken, kept)

    async def train() -> None:
        for update in range(arguments.updates + 1):
            policy = PolicyId(1, update)
            if update:
                await home.trainer.train_step(_batch(taken[-1], update))
            kept[update] = home.weights()
            await home.publish(policy)
            producer.published(policy)
            began = time.monotonic()
            collection = await producer.take(groups, policy)
            waits.append(time.monotonic() - began)
            assert collection is not None
            taken.append(collection)
            ledger.consume([(g.prompt.id, g.attempt) for g in collection.groups], update + 1)
            producer.consumed(collection.groups)
            found["updates"] = update

    began = time.monotonic()
    async with anyio.create_task_group() as tasks:
        await tasks.start(producer.run)
        await train()
        await producer.close()
        tasks.cancel_scope.cancel()
    wall_s = time.monotonic() - began
    samples = [s for c in taken for g in c.groups for s in g.samples]
    found |= {
        "wall_s": round(wall_s, 2),
        "s_per_update": round(wall_s / (arguments.updates + 1), 3),
        "samples": len(samples),
        "tokens": sum(len(s.token_ids) for s in samples),
        "mixed_samples": sum(s.is_mixed for s in samples),
        "most_policies_in_one": max(len({p.policy for p in s.spans}) for s in samples),
        "waits_for_collection_s": round(statistics.median(waits), 3),
        "publications": home.summary(home.decisions[2:]),
    }


def _batch(collection: Collection, update: int) -> TrainBatch:
    advantages = [[float(a) for a in group_advantages(g.rewards)] for g in collection.groups]
    return TrainBatch(
        update=update, sequences=to_sequences(collection, advantages), consumed_digest=""
    )


async def gaps(home: Home, found: Found) -> None:
    """Mean and largest |engine - trainer| of log-probs in the spans of each policy."""
    taken, kept = home.seen
    flat = [s for c in taken for g in c.groups for s in g.samples]
    sequences = [
        replace(q, group=1000 * c.id + q.group)  # groups of several collections are scored at once
        for c in taken
        for q in to_sequences(c, [[0.0] * len(g.samples) for g in c.groups])
    ]
    means: dict[str, float] = {}
    largest, wrong = 0.0, []
    for update, weights in kept.items():
        chosen = _of_policy(flat, update)
        if not chosen:
            continue
        home.load_weights(weights)
        scored = await home.trainer.score(tuple(sequences[i] for i in chosen), temperature=1.0)
        by_span: dict[bool, list[float]] = defaultdict(list)
        for i, logprobs in zip(chosen, scored, strict=True):
            for span in flat[i].spans:
                theirs = torch.tensor(flat[i].logprobs[span.start : span.end])
                gap = (torch.from_numpy(logprobs)[span.start : span.end] - theirs).abs()
                by_span[span.policy.update == update] += gap.tolist()
        means[f"u{update}"] = round(statistics.fmean(by_span[True]), 5)
        largest = max(largest, max(by_span[True]))
        wrong += by_span[False]
        found |= {
            "mean_by_policy": means,
            "largest_mean": max(means.values()),
            "largest": round(largest, 4),
            "limit": LIMIT,
            "holds": max(means.values()) <= LIMIT,
            "mean_of_other_policies": round(statistics.fmean(wrong), 5) if wrong else None,
        }
    home.forget()


def _of_policy(samples: list[Any], update: int) -> list[int]:
    """Some responses with tokens of that policy: those of several policies first."""
    has_it = [i for i, s in enumerate(samples) if any(p.policy.update == update for p in s.spans)]
    return sorted(has_it, key=lambda i: not samples[i].is_mixed)[:SCORED]


async def main_async(arguments: argparse.Namespace, folder: Path) -> Found:
    """All parts; one that fails or takes too long does not take the others' figures along."""
    found: Found = {}
    with Last(arguments, found, "start", arguments.start_limit):
        home = await Home.make(arguments, folder)
    found |= {"machine": home.machine(), "engine": home.facts()}
    stages = {
        "under_fire": lambda to: under_fire(home, arguments, to),
        "gaps": lambda to: gaps(home, to),
        "transports": lambda to: home.transports(arguments.rounds, to),
        "throughput": lambda to: home.throughput(arguments, to),
        "faults": lambda to: faults(home, to),
    }
    ends = time.monotonic() + arguments.limit
    try:
        for name in arguments.parts.split(","):
            limit_s = min(LIMITS_S[name] * arguments.slower, ends - time.monotonic())
            if limit_s <= 0:
                found[name] = {"error": "not begun: no time was left"}
                continue
            part: Found = {}
            found[name] = part
            began = time.monotonic()
            with Last(arguments, found, name, limit_s):
                try:
                    await home.settle()
                    with anyio.fail_after(limit_s):
                        await stages[name](part)
                except Exception as error:  # the figures of the other parts are worth having
                    first = most_telling([error])
                    part["error"] = f"{type(first).__name__}: {first}"[:2000]
            found[f"{name}_took_s"] = round(time.monotonic() - began, 1)
            write(arguments, found)
    finally:
        with Last(arguments, found, "end", GRACE_S):
            await home.close()
    return found


def write(arguments: argparse.Namespace, found: Found) -> None:
    """Put all figures so far where they are wanted."""
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1, default=str) + "\n")


class Last:
    """The end of this process where a part stands still and cannot be cancelled.

    It says where every thread stands, shortly before the part's limit and again, writes what there
    is and ends. The engine ends with it.
    """

    def __init__(
        self, arguments: argparse.Namespace, found: Found, name: str, limit_s: float
    ) -> None:
        def end() -> None:
            try:
                faulthandler.dump_traceback()
                found[f"{name}_stood_still"] = True
                write(arguments, found)  # fails where a part puts a figure in at this moment
            finally:
                os._exit(3)

        self._tell_s = 0.9 * limit_s
        self._timer = threading.Timer(limit_s + GRACE_S, end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        faulthandler.dump_traceback_later(self._tell_s)
        self._timer.start()

    def __exit__(self, *exc: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._timer.cancel()


def main() -> None:
    """Run it and print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine-python", default="")
    parser.add_argument("--parts", default="under_fire,gaps,transports,throughput,faults")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument(
        "--pause", choices=("in_place", "retract", "abort"), default="in_place",
        help="of engines with per-token spans; others always abort and continue",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batches", type=int, default=5, help="of a side of throughput")
    parser.add_argument("--start-limit", type=float, default=300.0, help="seconds, trainer too")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of all parts together")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.slower = 4 if arguments.cpu else 1
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
    if arguments.cpu:
        arguments = argparse.Namespace(**{
            **vars(arguments), "concurrency": 32, "prompt_tokens": 8, "tokens": 24, "updates": 4,
            "rounds": 2, "limit": 4 * arguments.limit,
        })  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="mpg-") as name:
        arguments.model = str(make_model(Path(name) / "model", "tiny" if arguments.cpu else "0.6b"))
        arguments.engine_args = (
            {"max_total_tokens": 20000}
            if arguments.cpu
            else {**GPU_ARGS, "mem_fraction_static": 0.4}
        )
        found = anyio.run(main_async, arguments, Path(name))
    print(json.dumps(found, indent=1))  # what the command is for


if __name__ == "__main__":
    main()
