"""The environment a SGLang server is started with, and its private folder."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from runtime.caches import ninja, parts
from runtime.engines.sglang.settings import SglangSettings
from runtime.interpreters import environment_of_another

ROOT = Path(__file__).resolve().parents[3]
"""Where ``runtime`` lies: the server imports ``runtime.engines.sglang.inside`` from there."""

_PLUGIN = "milepost_engine"
_ENTRY_POINTS = f"[sglang.srt.plugins]\n{_PLUGIN} = runtime.engines.sglang.inside.plugin:register\n"
_METADATA = f"Metadata-Version: 2.1\nName: {_PLUGIN.replace('_', '-')}\nVersion: 1\n"


def make_private(folder: Path) -> None:
    """Make a fresh folder for one incarnation.

    Module cache, temporary files, plugin metadata, and the ``ninja`` that knows what was restored.
    """
    shutil.rmtree(folder, ignore_errors=True)
    info = folder / "plugins" / f"{_PLUGIN}-1.dist-info"
    for path in (info, folder / "modules", folder / "tmp"):
        path.mkdir(parents=True)
    ninja.write_guard(folder / "bin")
    (info / "METADATA").write_text(_METADATA)
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)


def server_environment(
    settings: SglangSettings, private: Path, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The owner's environment with what the server needs; devices are as Ray has masked them."""
    caches = Path(settings.cache_root or platformdirs.user_cache_path("milepost") / "engines")
    env = environment_of_another(environ, first=(private / "plugins", ROOT))
    # Compiled things outlive a server: the next start finds them.
    for name, folder in parts.environment(caches).items():
        # A session that keeps an archive of caches has pointed its processes at its own folder.
        if settings.cache_root is not None or not env.get(name):
            env[name] = folder
    env.update(
        PATH=os.pathsep.join((str(private / "bin"), env.get("PATH", os.defpath))),
        PYTHONUNBUFFERED="1",
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        # Models with code of their own: several servers writing one module cache tear its files.
        HF_MODULES_CACHE=str(private / "modules"),
        TMPDIR=str(private / "tmp"),
        SGLANG_TIMEOUT_KEEP_ALIVE=str(math.ceil(settings.keepalive_s)),
        # Its 503 of a paused or hung server must come before a probe gives up at 10 s.
        SGLANG_HEALTH_CHECK_TIMEOUT="8",
    )
    if plugins := env.get("SGLANG_PLUGINS"):
        env["SGLANG_PLUGINS"] = f"{plugins},{_PLUGIN}"
    if settings.waiting_timeout_s is not None:
        env["SGLANG_REQ_WAITING_TIMEOUT"] = str(settings.waiting_timeout_s)
    if settings.running_timeout_s is not None:
        env["SGLANG_REQ_RUNNING_TIMEOUT"] = str(settings.running_timeout_s)
    if settings.host == "127.0.0.1":
        env.update(SGLANG_HOST_IP=settings.host, HOST_IP=settings.host)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            env.setdefault(name, "lo")
    if settings.device == "cpu":
        threads = str(settings.threads)
        env.update(SGLANG_USE_CPU_ENGINE="1", OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads)
    return env
