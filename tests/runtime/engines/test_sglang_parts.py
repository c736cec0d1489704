"""The parts of SGLang's owner that need no SGLang."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.load import load_run
from runtime.caches import parts
from runtime.engines.factory import engine_owner
from runtime.engines.sglang.bounded_log import BoundedLog
from runtime.engines.sglang.environment import make_private, server_environment
from runtime.engines.sglang.inside.stamps import UPDATES, hook_stamps
from runtime.engines.sglang.owner import SglangOwner
from runtime.engines.sglang.process_group import end_group, is_left, members
from runtime.engines.sglang.settings import SglangSettings, command_line

FAMILY = """
import os, subprocess, sys, time
code = "import time; print(1, flush=True); time.sleep(99)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
print("ready", flush=True)
time.sleep(99)
"""


def family() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_a_group_ends_whole_even_when_it_is_frozen():
    process = family()
    group = members(process.pid)
    assert len(group) == 2
    for member in group:
        os.kill(member.pid, signal.SIGSTOP)
    assert all(map(is_left, group))
    assert end_group(process, grace_s=0.0)
    assert not any(map(is_left, group))


def test_children_of_a_dead_leader_are_ended_too():
    process = family()
    group = members(process.pid)
    process.kill()
    process.wait()
    assert [is_left(m) for m in group if m.pid != process.pid] == [True]
    assert end_group(process, grace_s=0.0)
    assert not any(map(is_left, group))


def test_another_process_with_the_same_id_is_not_taken_for_a_worker():
    (mine,) = [m for m in members(os.getpgid(0)) if m.pid == os.getpid()]
    assert is_left(mine)
    assert not is_left(type(mine)(mine.pid, mine.start - 1, mine.title, is_zombie=False))


def test_a_log_keeps_its_newest_part_and_the_one_before(tmp_path: Path):
    log = BoundedLog(tmp_path / "log", max_bytes=1000)
    descriptor = log.open()
    os.write(descriptor, b"old\n" * 300)
    log.bound()
    os.write(descriptor, b"new\n")
    os.close(descriptor)
    log.bound()

    assert (tmp_path / "log").read_bytes() == b"new\n"
    assert (tmp_path / "log.1").read_bytes() == b"old\n" * 300
    # What begins after more bytes than are left was written after the file was emptied.
    assert log.tail(since=1200) == "new\n"
    assert log.tail(since=4) == ""


def test_a_watched_log_is_bounded_without_being_asked(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr("runtime.engines.sglang.bounded_log._LOOK_EVERY_S", 0.01)
    log = BoundedLog(tmp_path / "log", max_bytes=10)
    descriptor = log.open()
    log.watch()
    os.write(descriptor, b"x" * 100)
    while log.size() > 10:  # the test's own timeout bounds it
        time.sleep(0.01)
    log.close()
    os.close(descriptor)
    assert (tmp_path / "log.1").read_bytes() == b"x" * 100


def test_a_server_gets_a_private_module_cache_one_root_for_kernels_and_our_keepalive(
    tmp_path: Path,
):
    settings = SglangSettings(
        model_path="/m", python="/p", waiting_timeout_s=5.0, cache_root=str(tmp_path / "kernels")
    )
    given_env = {
        "PYTHONPATH": "/site", "VIRTUAL_ENV": "/v", "CUDA_VISIBLE_DEVICES": "3", "PATH": "/bin",
    }  # fmt: skip
    make_private(tmp_path / "private")
    env = server_environment(settings, tmp_path / "private", given_env)

    # What came out of an archive of caches is known to the first ninja there is.
    assert shutil.which("ninja", path=env["PATH"]) == str(tmp_path / "private" / "bin" / "ninja")
    assert env["PATH"].endswith(f"{os.pathsep}/bin")

    assert env["HF_MODULES_CACHE"].startswith(str(tmp_path / "private"))
    assert env["TRITON_CACHE_DIR"] == str(tmp_path / "kernels" / "triton")
    assert env["SGLANG_TIMEOUT_KEEP_ALIVE"] == "60"
    assert env["SGLANG_REQ_WAITING_TIMEOUT"] == "5.0"
    assert "SGLANG_REQ_RUNNING_TIMEOUT" not in env
    assert env["CUDA_VISIBLE_DEVICES"] == "3"
    assert "VIRTUAL_ENV" not in env
    assert env["PYTHONPATH"].endswith(f"{os.pathsep}/site")
    assert "SGLANG_USE_CPU_ENGINE" not in env


@pytest.mark.parametrize(("kept_s", "told"), [(None, "60"), (20.0, "20"), (10.5, "11")])
def test_a_run_files_keepalive_reaches_the_servers_environment_and_nothing_else_does(
    tmp_path: Path, kept_s: float | None, told: str
):
    sets = [] if kept_s is None else [f"rollout.engine_args.keepalive_s={kept_s}"]
    spec = load_run("configs/presets/laptop-sglang.toml", sets).spec
    owner = engine_owner(
        spec, model="/m", slot=0, api_key="k", log_path=tmp_path / "log", threads=1
    )
    assert isinstance(owner, SglangOwner)
    # Upstream's own 5 s, or whatever the shell says, would race with our clients.
    environ = {"SGLANG_TIMEOUT_KEEP_ALIVE": "5"}
    env = server_environment(owner.settings, tmp_path / "private", environ)
    assert env["SGLANG_TIMEOUT_KEEP_ALIVE"] == told
    assert not any("keepalive" in word.replace("-", "") for word in command_line(owner.settings))


def test_kernels_go_where_the_session_keeps_caches_for_its_archive(tmp_path: Path):
    settings = SglangSettings(model_path="/m", python="/p")
    kept = parts.environment(tmp_path / "caches")
    env = server_environment(settings, tmp_path / "private", kept)
    assert {name: env[name] for name in kept} == kept
    # Nothing compiled stays outside: most of a first start are SGLang's own CUDA kernels.
    alone = server_environment(settings, tmp_path / "private", {})
    moved = {name for name in alone if alone[name] != env[name]}
    places = {name for names in parts.PARTS.values() for name in names}
    assert places == {name for name in moved if "CACHE" in name or "WORKSPACE" in name}
    assert all(str(tmp_path) not in alone[name] for name in kept)


def test_the_plugin_is_found_the_way_the_server_looks_for_it(tmp_path: Path):
    make_private(tmp_path / "private")
    (found,) = distributions(path=[str(tmp_path / "private" / "plugins")])
    (point,) = found.entry_points.select(group="sglang.srt.plugins")
    assert point.load().__name__ == "register"


# --- Stamps: a model of a scheduler whose cache is a set of (key, weights that made it)


class Scheduler:
    """Keeps: requests wait, then are read whole by the weights of that moment; keys are looked up
    when reading begins."""

    def __init__(self) -> None:
        self.waiting_queue: list[Any] = []
        self.weights = 0
        self.cache: dict[str, int] = {}
        self.found: list[tuple[int, int]] = []

    def handle_generate_request(self, recv_req: Any) -> None:
        self.waiting_queue.append(SimpleNamespace(extra_key=recv_req.extra_key))

    def read_one(self) -> None:
        if self.waiting_queue:
            request = self.waiting_queue.pop(0)
            made_by = self.cache.setdefault(request.extra_key, self.weights)
            self.found.append((made_by, self.weights))


def make_stamped() -> tuple[Any, Any]:
    def load(self: Any, recv_req: Any) -> None:
        self.scheduler.weights += 1

    scheduler = type("Scheduler", (Scheduler,), {"handle_generate_request": _handle})
    updater = type("SchedulerWeightUpdaterManager", (), dict.fromkeys(UPDATES, load))
    hook_stamps(
        scheduler=SimpleNamespace(Scheduler=scheduler),
        updater=SimpleNamespace(SchedulerWeightUpdaterManager=updater),
    )
    made = scheduler()
    manager = updater()
    manager.scheduler = made
    return made, manager


def _handle(self: Scheduler, recv_req: Any) -> None:
    Scheduler.handle_generate_request(self, recv_req)


steps = st.lists(
    st.sampled_from(["ask", "ask unsalted", "read", "load"]) | st.sampled_from(UPDATES)
)


@given(steps)
def test_no_interleaving_finds_a_prefix_of_other_weights(order: list[str]):
    scheduler, manager = make_stamped()
    for step in order:
        if step.startswith("ask"):
            # The salt never changes: a client that is late with every publication.
            salt = None if step == "ask unsalted" else "e1.u0"
            scheduler.handle_generate_request(SimpleNamespace(extra_key=salt))
        elif step == "read":
            scheduler.read_one()
        else:
            getattr(manager, UPDATES[0] if step == "load" else step)(None)
    assert all(made_by == weights for made_by, weights in scheduler.found)


def test_equal_salts_still_share_under_the_same_weights():
    scheduler, manager = make_stamped()
    for _ in range(2):
        scheduler.handle_generate_request(SimpleNamespace(extra_key="e1.u0"))
        manager.update_weights_from_disk(None)
    keys = {request.extra_key for request in scheduler.waiting_queue}
    assert len(keys) == 1
    scheduler.handle_generate_request(SimpleNamespace(extra_key="e1.u1"))
    assert len({request.extra_key for request in scheduler.waiting_queue}) == 2
