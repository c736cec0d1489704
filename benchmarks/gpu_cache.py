"""Compiler caches on a GPU: what a start costs cold, and with what another session published.

A SGLang server and a trainer with ``core.compile`` start beside each other, as in a session, with
an empty cache folder; what was compiled is packed, published to a folder store and restored into
another folder. The first folder is deleted, and both start again from the second one. A watch
counts the compilers that ran below each, and the files that are new afterwards.

    python -m benchmarks.gpu_cache --engine-python /opt/sglang/bin/python --out cache.json

``--store`` may hold what another machine published: then there is no cold start, and the figures
are those of a new machine. ``--install`` leaves the kernels where servers without a session look
for them, so that later benchmarks start warm. ``--cpu`` tries everything on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu_task import GPU_ARGS, make_model
from runtime.caches.key import CacheKey, key_of
from runtime.caches.parts import environment
from runtime.caches.publishing import Publisher, restore
from runtime.caches.stores import FolderStore
from runtime.clock import SystemClock
from runtime.engines.embedded.owner import EmbeddedOwner
from runtime.engines.embedded.settings import EngineSettings
from runtime.engines.sglang.environment import server_environment
from runtime.engines.sglang.owner import SglangOwner
from runtime.engines.sglang.settings import SglangSettings

POLL_S = 0.2
SEQUENCES = 8
MAKE_DEADLINE_S = 300.0
TRAINER_DEADLINE_S = 600.0
"""Imports, compilation and two updates of an empty cache."""
COMPILERS = frozenset(
    ("nvcc", "cicc", "ptxas", "fatbinary", "cudafe++", "ninja", "cc1plus", "cc1", "ld")
)
BUILT = (".so", ".o", ".cubin", ".py", ".ptx")


def make_trainer_steps(model: str, *, on_gpu: bool) -> dict[str, float]:
    """In a process of its own: load, the first update and the one after it."""
    began = time.perf_counter()
    import anyio
    import numpy as np

    from runtime.trainer.local import LocalGroup
    from runtime.trainer.protocol import Sequence, TrainBatch
    from runtime.trainer.settings import TrainerSettings

    prompt, response = (128, 256) if on_gpu else (16, 24)

    def sequence(i: int) -> Sequence:
        return Sequence(
            tokens=np.arange(2, prompt + response + 2, dtype=np.int32),
            prompt_len=prompt,
            logprobs=np.full(response, -5.0, np.float32),
            mask=np.ones(response, np.float32),
            advantage=1.0 - 2 * (i % 2),
            span_ends=np.array([response], np.int32),
            span_updates=np.array([-1], np.int32),
            prefill_update=-1,
            group=0,
            is_equal=False,
        )

    async def run() -> dict[str, float]:
        taken = {"imports_s": time.perf_counter() - began}
        settings = TrainerSettings(
            dtype="bfloat16" if on_gpu else "float32", compile=True, max_mean_logprob_gap=1e9
        )
        trainer = LocalGroup(settings)
        at = time.perf_counter()
        await trainer.load(model)
        taken["load_s"] = time.perf_counter() - at
        for name, update in (("first_s", 1), ("second_s", 2)):
            at = time.perf_counter()
            batch = TrainBatch(
                update=update,
                sequences=tuple(sequence(i) for i in range(SEQUENCES)),
                consumed_digest=f"{update}",
            )
            await trainer.train_step(batch)
            taken[name] = time.perf_counter() - at
        await trainer.shutdown()
        return {name: round(seconds, 2) for name, seconds in taken.items()}

    return anyio.run(run)


class CompilerWatch:
    """Counts the compilers that run below this process, by who started them."""

    def __init__(self) -> None:
        self.trainer: int | None = None
        """Its process; every other child is the server's."""
        self._seen: dict[str, set[tuple[int, str]]] = {"server": set(), "trainer": set()}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, dict[str, int]]:
        """Number of processes by name; those that lived less than a poll may be missing."""
        self._over.set()
        self._thread.join()
        return {
            who: dict(sorted(Counter(name for _, name in seen).items()))
            for who, seen in self._seen.items()
        }

    def _look(self) -> None:
        me = psutil.Process()
        while not self._over.wait(POLL_S):
            for child in me.children():
                who = "trainer" if child.pid == self.trainer else "server"
                try:
                    for process in child.children(recursive=True):
                        if (name := process.name()) in COMPILERS:
                            self._seen[who].add((process.pid, name))
                except psutil.Error:
                    continue


class Bench:
    """One machine's round; figures are on disk after every part."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.folder: Path = arguments.folder
        self.out: Path = arguments.out or self.folder / "cache.json"
        self.found: dict[str, Any] = {"command": " ".join(sys.argv[1:])}

    def tell(self, **found: Any) -> None:
        """Add to the figures, and write them all."""
        self.found |= found
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.found, indent=1) + "\n")
        print(json.dumps(found), flush=True)

    def run(self) -> None:
        """Cold, publish, restore, warm; or the latter two with what the store has."""
        model = self.prepare()
        python = self.arguments.engine_python or None
        layout = {"compile": True, "engine": "sglang" if python else "embedded", "args": GPU_ARGS}
        key = key_of(model, layout, engine_python=python)
        self.tell(key=dataclasses.asdict(key), digest=key.digest)
        store = FolderStore(self.arguments.store or self.folder / "store")
        warm = self.folder / "warm"
        shutil.rmtree(warm, ignore_errors=True)
        if not self.restored(warm, store, key):
            cold = self.folder / "cold"
            for old in (cold, self.folder / "gone"):
                shutil.rmtree(old, ignore_errors=True)
            self.tell(cold=self.started("cold", cold, model))
            self.published(cold, store, key)
            # What names a file by its whole path must not find it there any more.
            shutil.rmtree(cold.rename(self.folder / "gone"), ignore_errors=True)
            shutil.rmtree(warm, ignore_errors=True)
            self.restored(warm, store, key)
        before = files(warm)
        self.tell(warm=self.started("warm", warm, model))
        new = sorted(name for name, found in files(warm).items() if before.get(name) != found)
        self.tell(new_files=len(new), new_built=[name for name in new if name.endswith(BUILT)][:40])
        self.leave(warm)

    def prepare(self) -> Path:
        """The model, and beside it one import of the server: both starts find its files read."""
        model = self.folder / f"model-{self.shape}"
        began = time.monotonic()
        making = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_cache", "--make", str(model), *self.cpu_flag]
        )
        try:
            if python := self.arguments.engine_python:
                subprocess.run(
                    [python, "-c", "import sglang.srt.entrypoints.http_server"],
                    env=os.environ | environment(self.folder / "imports")
                    | ({"SGLANG_USE_CPU_ENGINE": "1"} if self.arguments.cpu else {}),
                    check=False, capture_output=True, timeout=120,
                )  # fmt: skip
            if making.wait(MAKE_DEADLINE_S) != 0:
                raise SystemExit("the model could not be made")
        finally:
            making.kill()  # nothing where it has ended
            making.wait()
        self.tell(prepare_s=round(time.monotonic() - began, 1))
        return model

    def restored(self, root: Path, store: FolderStore, key: CacheKey) -> bool:
        """Bring in what is published; False where nothing is."""
        began = time.monotonic()
        found = restore(root, store, key, wait_s=60.0)
        if found.problems:
            self.tell(restore_problems=dict(found.problems))
        if not found.parts:
            return False
        self.tell(restore_s=round(time.monotonic() - began, 3), restored=dict(found.parts))
        return True

    def published(self, root: Path, store: FolderStore, key: CacheKey) -> None:
        """Pack and publish; what each part came to."""
        reports = Publisher(
            root=root, store=store, key=key, by="benchmark", publishers=2, wait_s=60.0,
            clock=SystemClock(),
        ).publish()  # fmt: skip
        self.tell(
            parts={report.part: dataclasses.asdict(report) for report in reports},
            archive_bytes=sum(report.num_bytes for report in reports),
            archive_files=sum(report.num_files for report in reports),
            pack_s=round(sum(report.pack_s for report in reports), 3),
            publish_s=round(sum(report.publish_s for report in reports), 3),
        )

    def started(self, name: str, root: Path, model: Path) -> dict[str, Any]:
        """A server's first token and a trainer's first updates, with their caches in ``root``."""
        os.environ.update(environment(root))
        watch = CompilerWatch()
        owner = self.owner(name, model)
        began, ended = time.monotonic(), list[float]()
        with ThreadPoolExecutor(1) as pool:
            starting = pool.submit(owner.start)
            starting.add_done_callback(lambda _: ended.append(time.monotonic()))
            trainer = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu_cache", "--steps", str(model),
                 *self.cpu_flag],
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            watch.trainer = trainer.pid
            try:
                output, _ = trainer.communicate(timeout=TRAINER_DEADLINE_S)
                trainer_s = time.monotonic() - began
                starting.result()  # the owner's own deadline ends it
            finally:
                trainer.kill()
                trainer.wait()
                wait([starting])
                compilers = watch.stop()
                owner.stop()
        lines = output.splitlines() if trainer.returncode == 0 else []
        return {
            "server_first_token_s": round(ended[0] - began, 1),
            "trainer_process_s": round(trainer_s, 1),
            "trainer": json.loads(lines[-1]) if lines else f"exited with {trainer.returncode}",
            "compilers": compilers,
            "files": len(files(root)),
            "bytes": sum(size for size, _ in files(root).values()),
        }

    def leave(self, warm: Path) -> None:
        """Tell how later servers start warm; with ``--install`` they do by themselves."""
        lines = [f"export {name}={folder}" for name, folder in environment(warm).items()]
        (self.folder / "caches.env").write_text("\n".join(lines) + "\n")
        if not self.arguments.install:
            return
        settings = SglangSettings(model_path="", python="")
        theirs = server_environment(settings, self.folder, {})
        for name, folder in environment(warm).items():
            if Path(folder).is_dir() and name in theirs:
                # Renamed into place: a server that runs may have the file of now mapped.
                shutil.copytree(
                    folder, theirs[name], dirs_exist_ok=True, copy_function=replace_whole
                )
        self.tell(installed_at=str(Path(theirs["TRITON_CACHE_DIR"]).parent))

    def owner(self, name: str, model: Path) -> SglangOwner | EmbeddedOwner:
        """Of the server, its log beside the figures."""
        log_path = str(self.out.parent / f"engine-{name}.log")
        if not self.arguments.engine_python:
            settings = EngineSettings(model_path=str(model), dtype="float32")
            return EmbeddedOwner(slot=0, settings=settings, log_path=log_path)
        cpu = self.arguments.cpu
        return SglangOwner(
            slot=0,
            settings=SglangSettings(
                model_path=str(model),
                python=self.arguments.engine_python,
                device="cpu" if cpu else "cuda",
                dtype="float32" if cpu else "bfloat16",
                seed=1,
                args={"max_total_tokens": 8192} if cpu else GPU_ARGS | {"mem_fraction_static": 0.4},
            ),
            log_path=log_path,
        )

    @property
    def shape(self) -> str:
        """Of the model."""
        return "tiny" if self.arguments.cpu else "0.6b"

    @property
    def cpu_flag(self) -> list[str]:
        """For processes of ours."""
        return ["--cpu"] if self.arguments.cpu else []


def replace_whole(source: str, target: str) -> str:
    """A copy that is seen whole or not at all."""
    part = f"{target}.new"
    shutil.copy2(source, part)
    Path(part).replace(target)
    return target


def files(root: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of all files below a folder."""
    found = {p: p.stat() for p in root.rglob("*") if p.is_file()}
    return {str(p.relative_to(root)): (s.st_size, s.st_mtime_ns) for p, s in found.items()}


def main() -> None:
    """Run the round, or (inside) one of its processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine-python", default="", help="empty: the embedded engine")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/milepost-caches"))
    parser.add_argument("--store", type=Path, help="below --folder where absent")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--steps", help=argparse.SUPPRESS)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = "tiny" if arguments.cpu else "0.6b"
    if arguments.steps:
        print(json.dumps(make_trainer_steps(arguments.steps, on_gpu=not arguments.cpu)))
    elif arguments.make:
        make_model(arguments.make, shape)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what it started is taken along
        Bench(arguments).run()


if __name__ == "__main__":
    main()
