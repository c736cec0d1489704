"""P3: what guard, session and Ray cost an update, against a bare loop around the same parts.

    python -m benchmarks.bench_orchestration --rounds 2 --out orchestration.json

Both sides run the 4.8 M model, 8 prompts x 8 samples x 16 tokens (about 1 s an update), one update
stale: the embedded engine generates the next collection while the trainer works on this one. The
bare side is one process with the engine's client and the trainer in a thread; the other is a whole
run. Sides take turns; medians of the updates after the tenth.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from configs.load import load_run
from runtime.data.prompts import load_tokenizer
from runtime.engines.client import HttpEngineClient
from runtime.engines.embedded.owner import EmbeddedOwner
from runtime.engines.embedded.settings import EngineSettings
from runtime.engines.protocol import GenerateRequest, Generation, SamplingSettings
from runtime.launch.start import start_run
from runtime.policy import PolicyId
from runtime.recipes import laptop
from runtime.session.answers import Running
from runtime.session.ensure import ensure
from runtime.trainer.advantages import group_advantages, is_equal_group
from runtime.trainer.local import LocalGroup
from runtime.trainer.protocol import Sequence, TrainBatch
from runtime.trainer.settings import LossSettings, OptimizerSettings, TrainerSettings

GROUPS, SAMPLES, TOKENS, UPDATES, WARM = 8, 8, 16, 40, 10

RUN_FILE = f"""
name = "orchestration"
[model]
path = "{{made}}/model"
dtype = "float32"
[data]
train = "{{made}}/train.jsonl"
max_prompt_tokens = 32
[rollout]
groups_per_collection = {GROUPS}
samples_per_prompt = {SAMPLES}
max_response_tokens = {TOKENS}
[async]
max_staleness = 1
[reward]
verifier = "letters:score"
[core]
loss = "dapo"
eps_clip_high = 0.2
lr = 1e-5
activation_checkpointing = false
max_updates = {UPDATES}
[evaluation]
final = false
[output]
root = "run"
[tracking]
mode = "disabled"
[launch]
detached = true
"""
VERIFIER = """
def score(response, answer, metadata):
    return float(len(response) % 2)
"""


def whole_run(made: Path, folder: Path) -> list[float]:
    """Seconds per update of a run."""
    folder.mkdir()
    (folder / "letters.py").write_text(VERIFIER)
    (folder / "run.toml").write_text(RUN_FILE.format(made=made))
    start_run(load_run(folder / "run.toml"))
    while isinstance(ensure(folder / "run", "finish", deadline_s=300.0), Running):
        pass
    rows = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    timed = (r["values"].get("train/elapsed_s/update") for r in rows if r["axis"] == "train/update")
    return [seconds for seconds in timed if seconds is not None]


async def bare_loop(made: Path, folder: Path) -> list[float]:
    """Seconds per update of a loop with nothing around engine and trainer."""
    prompts = [json.loads(line)["prompt"] for line in (made / "train.jsonl").open()]
    encode = load_tokenizer(made / "model").encode
    ids = [tuple(encode(f"<|user|>{p}<|assistant|>", add_special_tokens=False)) for p in prompts]
    owner = EmbeddedOwner(
        slot=0, settings=EngineSettings(model_path=str(made / "model"), dtype="float32")
    )
    address = owner.start()
    client = HttpEngineClient(address.url)
    trainer = LocalGroup(
        TrainerSettings(
            loss=LossSettings.named("dapo", eps_clip_high=0.2, max_response_tokens=TOKENS),
            optimizer=OptimizerSettings(lr=1e-5),
        )
    )
    try:
        await trainer.load(str(made / "model"))
        await _publish(trainer, client, folder, 0)
        return await _updates(trainer, client, ids, folder)
    finally:
        await client.close()
        await trainer.shutdown()
        owner.stop()


async def _updates(
    trainer: LocalGroup, client: HttpEngineClient, ids: list[tuple[int, ...]], folder: Path
) -> list[float]:
    seconds: list[float] = []
    ready = await _collect(client, ids[:GROUPS], 0)
    last = time.perf_counter()
    for update in range(1, UPDATES + 1):
        batch = TrainBatch(update=update, sequences=ready, consumed_digest="")
        found: list[tuple[Sequence, ...]] = []

        async def generate(update: int = update, found: list[Any] = found) -> None:
            chosen = ids[update * GROUPS : (update + 1) * GROUPS]
            found.append(await _collect(client, chosen, update))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate)
            await trainer.train_step(batch)
            await _publish(trainer, client, folder, update)
        ready = found[0]
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
    return seconds


async def _publish(
    trainer: LocalGroup, client: HttpEngineClient, folder: Path, update: int
) -> None:
    to = folder / str(update % 2)
    to.mkdir(parents=True, exist_ok=True)
    await trainer.write_snapshot(str(to))
    await client.pause("in_place")
    await client.update_from_disk(str(to), PolicyId(1, update), flush=False)
    await client.resume()


async def _collect(
    client: HttpEngineClient, prompts: list[tuple[int, ...]], update: int
) -> tuple[Sequence, ...]:
    groups: dict[int, tuple[Sequence, ...]] = {}

    async def one(number: int, prompt: tuple[int, ...]) -> None:
        request = GenerateRequest(
            rid=f"{update}-{number}",
            input_ids=prompt,
            n=SAMPLES,
            sampling=SamplingSettings(max_new_tokens=TOKENS),
        )
        answers = await client.generate(request, deadline_s=120.0)
        groups[number] = _sequences(number, prompt, answers)

    async with anyio.create_task_group() as tasks:
        for number, prompt in enumerate(prompts):
            tasks.start_soon(one, number, prompt)
    return tuple(sequence for number in range(len(prompts)) for sequence in groups[number])


def _sequences(
    number: int, prompt: tuple[int, ...], answers: list[Generation]
) -> tuple[Sequence, ...]:
    rewards = [float(sum(answer.token_ids) % 2) for answer in answers]
    advantages = group_advantages(rewards)
    return tuple(
        Sequence(
            tokens=np.array([*prompt, *answer.token_ids], np.int32),
            prompt_len=len(prompt),
            logprobs=np.array(answer.logprobs, np.float32),
            mask=np.ones(len(answer.token_ids), np.float32),
            advantage=float(advantage),
            span_ends=np.array([span.end for span in answer.spans], np.int32),
            span_updates=np.array([span.policy.update for span in answer.spans], np.int32),
            prefill_update=answer.prefill.update,
            group=number,
            is_equal=is_equal_group(rewards),
        )
        for answer, advantage in zip(answers, advantages, strict=True)
    )


def main() -> None:
    """Take turns, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the JSON there instead of printing it")
    args = parser.parse_args()
    load = os.getloadavg()
    sides: dict[str, list[float]] = {"run": [], "bare": []}
    with tempfile.TemporaryDirectory(prefix="mpb-") as name:
        base = Path(name)
        made = base / "made"
        laptop.make(made, seed=1, prompts=1024, shape="5m", warm_up_until=None)
        for number in range(args.rounds):
            sides["run"].append(statistics.median(whole_run(made, base / f"run{number}")[WARM:]))
            loop = partial(bare_loop, made, base / f"bare{number}")
            sides["bare"].append(statistics.median(anyio.run(loop)[WARM:]))
    run, bare = statistics.median(sides["run"]), statistics.median(sides["bare"])
    answer = {
        "id": "P3",
        "s_per_update": sides,
        "overhead": round(run / bare - 1, 4),
        "load_before": load,
        "cores": os.cpu_count(),
    }
    text = json.dumps(answer, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
