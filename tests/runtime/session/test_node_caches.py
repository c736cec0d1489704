"""Caches on the hosts of a group: by real actors of a real Ray, whose nodes share this host."""

import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from runtime.caches.publishing import PartReport
from runtime.errors import SessionLost
from runtime.rundir import atomic, enter
from runtime.rundir.attempt import GuardFile
from runtime.rundir.liveness import Mark
from runtime.rundir.processes import HostBoot
from runtime.rundir.receipts import read_receipt
from runtime.session import node_caches
from runtime.session.caching import SessionCaches
from runtime.session.deadman import Switch
from runtime.session.node_caches import CacheOrder, GroupCaches, hosts_of, once, order_on
from runtime.session.nodes import Node, Nodes
from runtime.session.scratch import private_folder
from runtime.telemetry.recorder import Recorder
from tests.runtime.session.attempted import context_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(480)]


def node(address: str) -> Node:
    return Node(id=address, address=address)


def test_each_host_is_asked_once_for_what_compiles_there() -> None:
    nodes = Nodes(nodes=(node("a"), node("b"), node("c"), node("d")))
    assert hosts_of(nodes, trainer_ranks=2, engines=1) == {
        "a": (0, ["trainer"]),
        "b": (1, ["trainer"]),
        "d": (3, ["engine"]),
    }
    one = Nodes(nodes=(node("a"), node("a")))
    assert hosts_of(one, trainer_ranks=1, engines=1) == {"a": (0, ["engine", "trainer"])}


def test_an_engines_interpreter_is_asked_on_its_own_hosts_alone(tmp_path: Path) -> None:
    order = CacheOrder(
        root=tmp_path, place=tmp_path, model=tmp_path, layout={"dtype": "float32"},
        wait_s=1.0, publishers=1, by="t", engine_python="/sglang/python",
    )  # fmt: skip
    served, trained = order_on(order, ["engine", "trainer"]), order_on(order, ["trainer"])
    assert (served.engine_python, trained.engine_python) == ("/sglang/python", None)
    assert served.layout == {"dtype": "float32", "node": "engine+trainer"}
    assert trained.layout != served.layout


async def test_what_is_so_from_the_start_is_acted_on_once() -> None:
    acted: list[int] = []
    done = anyio.Event()

    async def act() -> None:
        acted.append(1)
        done.set()

    async with once(lambda: True, act):
        await done.wait()
    assert acted == [1]


class Remote:
    """A method of a host's actor, as Ray gives it: ``remote`` answers when it is awaited."""

    def __init__(self, answer: Callable[[], Awaitable[object]]) -> None:
        self.remote = answer


class Host:
    """An actor that answers to publishing; ``publish`` runs until it does."""

    def __init__(self, publish: Callable[[], Awaitable[object]]) -> None:
        self.publish = Remote(publish)
        self.cancelled = 0
        self.cancel = Remote(self._cancel)  # type: ignore[arg-type]

    def _cancel(self) -> None:
        self.cancelled += 1


async def test_who_answered_before_the_parting_counts_though_another_never_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hardware is taken once one host has answered; the other hangs for ever."""
    monkeypatch.setattr(node_caches, "_PARTING_S", 0.0)
    report = PartReport(part="inductor", outcome="published")
    answered = anyio.Event()

    async def answers() -> list[PartReport]:
        answered.set()
        return [report]

    order = CacheOrder(
        root=tmp_path, place=tmp_path, model=tmp_path, layout={}, wait_s=600.0, publishers=1, by="t"
    )
    group = GroupCaches(order=order, attempt_dir=str(tmp_path), epoch=1)
    quick, hanging = Host(answers), Host(anyio.sleep_forever)
    group._actors.update(quick=quick, hanging=hanging)
    assert await group.publish(answered.is_set) == {"quick": [report]}
    assert (quick.cancelled, hanging.cancelled) == (1, 1)


def test_a_folder_that_others_can_look_into_is_refused(tmp_path: Path) -> None:
    private_folder(tmp_path / "mine")
    private_folder(tmp_path / "mine")
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(SessionLost, match="not a folder of this user alone"):
        private_folder(tmp_path / "open")


@pytest.fixture(scope="module")
def nodes(ray_head: None) -> Nodes:
    from ray.util.placement_group import placement_group

    group = placement_group([{"CPU": 1.0}], strategy="STRICT_SPREAD")
    assert group.wait(120)
    return Nodes(nodes=(node("127.0.0.1"),), group=group)


class Session:
    """One session of a run with a guard that lives, and its recorder."""

    def __init__(self, folder: Path, switch: Switch, store: Path, root: Path) -> None:
        self.context = context_of(folder, f"output.compiler_cache={json.dumps(str(store))}")
        (folder / "config.json").write_text("{}")
        lease = self.context.root.lease
        lease.touch()
        here, mark = HostBoot.here(), Mark.of(lease)
        guard = GuardFile.read(self.context.attempt).model_copy(
            update={
                "host": here.host, "boot_id": here.boot_id, "pid": os.getpid(),
                "started": enter.started(os.getpid()), "fifo": str(switch.path),
                "lease_s": 600.0, "lease_device": mark.identity[0],
                "lease_inode": mark.identity[1],
            }
        )  # fmt: skip
        atomic.write_bytes(self.context.attempt.guard, guard.encode())
        self.model = folder
        self.root = root
        self.recorder = Recorder(
            self.context.root.path, self.context.owner, clock=self.context.clock
        )
        found = SessionCaches.of(self.context, self.recorder, root)
        assert found is not None
        self.caches = found

    def compile(self) -> None:
        kernel = Path(self.caches.environment["TORCHINDUCTOR_CACHE_DIR"]) / "kernel"
        kernel.parent.mkdir(parents=True)
        kernel.write_bytes(b"code")

    async def outcomes(self) -> dict[str, str]:
        await self.caches.publish(lambda: False)
        receipt = read_receipt(self.context.root, "cache")
        assert receipt is not None
        return {name: report["outcome"] for name, report in receipt.detail.items()}

    def starts(self) -> list[bool]:
        self.recorder.flush()
        rows = map(json.loads, self.context.root.driver_timing.read_text().splitlines())
        return [row["cold"] for row in rows if row["name"] == "cache_restore"]


@pytest.mark.ray
async def test_a_host_publishes_by_its_actor_and_one_that_is_lost_costs_its_cache_alone(
    nodes: Nodes, tmp_path: Path
) -> None:
    import ray

    store, local = tmp_path / "store", tmp_path / "local"
    (local / "run-0.caches" / "triton").mkdir(parents=True)  # of a session that died here
    local.chmod(0o700)
    with Switch() as switch:
        first = Session(tmp_path / "first", switch, store, local / "run-1.caches")
        await first.caches.restore(first.model, nodes)
        assert first.starts() == [True]
        assert [path.name for path in local.iterdir()] == ["run-1.caches"]
        first.compile()
        await first.caches.gather(lambda: False)
        assert not first.root.exists()
        assert await first.outcomes() == {"127.0.0.1/inductor": "published"}

        second = Session(tmp_path / "second", switch, store, local / "run-2.caches")
        await second.caches.restore(second.model, nodes)
        assert second.starts() == [False]
        assert (second.root / "inductor" / "kernel").read_bytes() == b"code"
        assert second.caches._group is not None
        for actor in second.caches._group._actors.values():
            ray.kill(actor, no_restart=True)
        await second.caches.gather(lambda: False)
        assert await second.outcomes() == {"127.0.0.1": "failed"}

        # Another layout is another key: a host that has the engine alone starts cold.
        alone = Session(tmp_path / "alone", switch, store, local / "run-3.caches")
        await alone.caches.restore(alone.model)
        assert alone.starts() == [True]


@pytest.mark.ray
async def test_hardware_that_is_taken_away_is_not_waited_for(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir(mode=0o700)
    with Switch() as switch:
        session = Session(
            tmp_path / "run", switch, tmp_path / "store", tmp_path / "local" / "run-1.caches"
        )
        await session.caches.restore(session.model, nodes)
        session.compile()
        await session.caches.gather(lambda: True)
        assert await session.outcomes() == {}
    assert not (tmp_path / "store").exists()
