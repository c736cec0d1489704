"""P12, the run's part: cost of a group and of a journal row, memory, from 10^3 to 10^6 prompts.

    python benchmarks/bench_ledger.py            one JSON object on stdout

Each size is a process of its own, so that one's memory is not counted for the next. A group is what
a run does with it: admit, finish, consume with 31 others, commit every 50 updates; measured without
and with reading its prompt from the frozen copy, which is shuffled, so that nearly every read of a
large one misses the cache. The same number of groups is measured at each size, in rounds that take
turns over the sizes (A B C A B C), in CPU microseconds; the median of the rounds counts. A journal
row is appended to a journal that has as many rows as there are prompts.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from runtime.data.ledger import Ledger
from runtime.data.order import PromptOrder
from runtime.data.prompts import FieldNames, PromptStore, freeze, open_frozen
from runtime.rundir.journal import Journal
from runtime.rundir.layout import RunRoot

SIZES = (1_000, 10_000, 100_000, 1_000_000)
GROUPS_PER_ROUND = 3_200
GROUPS_PER_COLLECTION = 32
UPDATES_PER_COMMIT = 50
ROWS_PER_ROUND = 2_000
IN_FLIGHT = 160


class WordTokenizer:
    """A token a word: fast, and as long as real prompts are (about 120 tokens)."""

    chat_template = "none"

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt):
        """The text as it is."""
        return conversation[0]["content"]

    def encode(self, text, *, add_special_tokens):
        """A token a word."""
        return list(range(text.count(" ") + 1))

    def get_vocab(self):
        """Nothing: ids mean nothing here."""
        return {}


def rss_mib() -> float:
    """Resident memory now, MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def make_data(folder: Path, num_prompts: int) -> Path:
    """Freeze ``num_prompts`` prompts of 120 words."""
    words = [f"w{i}" for i in np.random.default_rng(0).integers(0, 5000, 4096)]
    source, target = folder / "rows.jsonl", folder / f"{num_prompts}.parquet"
    with source.open("w") as file:
        for i in range(num_prompts):
            at = (i * 37) % 3900
            row = {"prompt": f"{i} " + " ".join(words[at : at + 119]), "answer": str(i)}
            file.write(json.dumps(row) + "\n")
    freeze(
        source,
        target,
        tokenizer=WordTokenizer(),
        fields=FieldNames(),
        max_prompt_tokens=200,
        default_verifier="exact_match",
    )
    source.unlink()
    return target


class Run:
    """The ledger's side of a run: groups in flight, collections, commits."""

    def __init__(self, store: PromptStore | None, num_prompts: int) -> None:
        # Two passes or as many as the rounds need: a small set must not run dry.
        self.ledger = Ledger(PromptOrder(num_prompts, epochs=10_000, seed=1))
        self.store = store
        self.update = 0
        self.flying: list[tuple] = []
        self.commit_bytes: list[int] = []

    def groups(self, count: int) -> None:
        """Carry ``count`` groups from admission to consumption."""
        for _ in range(count // GROUPS_PER_COLLECTION):
            while len(self.flying) < IN_FLIGHT:
                admission = self.ledger.admit()
                if self.store is not None:
                    self.store.prompt(admission.prompt_id)
                self.flying.append((admission.prompt_id, admission.attempt))
            done = [self.flying.pop(0) for _ in range(GROUPS_PER_COLLECTION)]
            for key in done:
                self.ledger.finish(*key)
            self.update += 1
            self.ledger.consume(done, self.update)
            self.ledger.counts()
            if self.update % UPDATES_PER_COMMIT == 0:
                segment = self.ledger.snapshot()
                self.commit_bytes.append(len(segment.to_bytes()))
                self.ledger.committed(segment)


def make_journal(folder: Path, num_rows: int) -> Journal:
    """A journal with so many rows."""
    attempt = RunRoot.of(folder / f"run-{num_rows}").attempt(1)
    attempt.path.mkdir(parents=True)
    journal = Journal(attempt, epoch=1, role="session")
    journal.append("group.requeued", prompt="p0.17", reason="transport")
    path = attempt.root.journal
    thousand = path.read_bytes() * 1000
    with path.open("wb") as file:
        for _ in range(num_rows // 1000):
            file.write(thousand)
    return journal


def serve(num_prompts: int, folder: str) -> None:
    """One size, in a process of its own: a round for each line on stdin."""
    before = rss_mib()
    path = make_data(Path(folder), num_prompts)
    journal = make_journal(Path(folder), num_prompts)
    after_freeze = rss_mib()
    with open_frozen(path) as store:
        run, whole = Run(None, num_prompts), Run(store, num_prompts)
        run.groups(GROUPS_PER_ROUND)  # builds the first permutation, warms caches
        whole.groups(GROUPS_PER_ROUND)
        print("ready", flush=True)
        for line in sys.stdin:
            both = []
            for one in (run, whole):
                start = time.process_time()
                one.groups(GROUPS_PER_ROUND)
                both.append((time.process_time() - start) / GROUPS_PER_ROUND * 1e6)
            start = time.process_time()
            for number in range(ROWS_PER_ROUND):
                journal.append("group.requeued", prompt=f"p0.{number}", reason="transport")
            both.append((time.process_time() - start) / ROWS_PER_ROUND * 1e6)
            print(json.dumps(both), flush=True)
            del line
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            json.dumps(
                {
                    "rss_mib_imports": round(before, 1),
                    "rss_mib_frozen": round(after_freeze, 1),
                    "rss_mib_peak": round(peak, 1),
                    "commit_bytes": statistics.median(run.commit_bytes),
                    "file_mib": round(path.stat().st_size / 2**20, 1),
                }
            ),
            flush=True,
        )


def main() -> None:
    """Drive all sizes in turns and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        sides = {}
        for size in SIZES:
            command = [sys.executable, __file__, "--serve", str(size), "--folder", folder]
            sides[size] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert sides[size].stdout.readline() == "ready\n"
        figures = {size: [] for size in SIZES}
        for _ in range(args.rounds):
            for size, side in sides.items():
                side.stdin.write("round\n")
                side.stdin.flush()
                figures[size].append(json.loads(side.stdout.readline()))
        report = {"machine": platform.processor(), "python": platform.python_version()}
        for size, side in sides.items():
            side.stdin.close()
            ledger, whole, rows = zip(*figures[size], strict=True)
            report[str(size)] = {
                "ledger_cpu_us_per_group": round(statistics.median(ledger), 2),
                "ledger_spread": [round(min(ledger), 2), round(max(ledger), 2)],
                "with_prompt_cpu_us_per_group": round(statistics.median(whole), 1),
                "journal_cpu_us_per_row": round(statistics.median(rows), 2),
                **json.loads(side.stdout.readline()),
            }
            side.wait(30)
        for key in ("ledger_cpu_us_per_group", "journal_cpu_us_per_row"):
            costs = [report[str(size)][key] for size in SIZES]
            report[f"{key}_dearest_over_cheapest"] = round(max(costs) / min(costs), 3)
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
