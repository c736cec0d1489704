"""What a host shows, in tables: GPU listings, masks, interfaces, attention, lock, space."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from configs.plan import Plan, make_plan
from configs.runtime_lock import RuntimeLock
from runtime.errors import PreflightFailed
from runtime.launch.preflight import attention, gpus, network, preflight
from runtime.launch.preflight.checks import check_installed, check_space, corrected
from runtime.launch.preflight.gpus import Gpu, ask_driver, inventory, visible
from tests.runtime.launch.submissions import three_node

LISTINGS = Path(__file__).parent / "listings"
H200 = (LISTINGS / "h200-query.csv").read_text()
"""Read from a real machine."""
A100 = "".join(
    f"{i}, GPU-0000000{i}-aaaa-bbbb-cccc-000000000000, NVIDIA A100-SXM4-80GB, 81920, 570.1, 8.0,"
    " Disabled\n"
    for i in range(8)
)
H100 = A100.replace("A100-SXM4-80GB", "H100 80GB HBM3").replace(" 8.0,", " 9.0,")
SPLIT = (
    "0, GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77, NVIDIA A100, 40960, 570.1, 8.0, Enabled\n"
    "1, GPU-6d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a78, NVIDIA A100, 40960, 570.1, 8.0, Disabled\n"
)
SPLIT_LIST = """\
GPU 0: NVIDIA A100 (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100 (UUID: GPU-6d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a78)
"""
MIG = ("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb")
WHOLE = "GPU-6d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a78"


def answers(query: str, listing: str = "") -> list[Gpu]:
    return inventory(lambda argv, _: listing if "-L" in argv else query)


def test_a_real_h200() -> None:
    (gpu,) = answers(H200)
    assert (gpu.name, gpu.capability, gpu.generation) == ("NVIDIA H200", (9, 0), "hopper")
    assert gpu.memory_bytes == 143771 * 2**20
    assert gpus.parse_list((LISTINGS / "h200-list.txt").read_text()) == {gpu.uuid: ()}
    assert attention.settle([gpu], "auto") == "flash_3"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No devices were found\n",
        "0, GPU-1, H100, [N/A], 570.1, 9.0, Disabled\n",
        "0, GPU-1, H100, 81559, 570.1, ERR!, Disabled\n",
        "0, GPU-1, H100, 81559\n",
        "1, GPU-1, H100, 81559, 570.1, 9.0, Disabled\n",
    ],
)
def test_garbled_or_incomplete_output_ends_the_start(text: str) -> None:
    with pytest.raises(PreflightFailed, match="nvidia-smi"):
        answers(text)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["/no/such/nvidia-smi"], "no driver"),
        (
            [sys.executable, "-c", "import sys; sys.exit('NVML: driver mismatch')"],
            "driver mismatch",
        ),
        ([sys.executable, "-c", "import time; time.sleep(60)"], r"within 0\.3 s"),
    ],
)
def test_a_driver_that_is_missing_broken_or_late_ends_the_start(
    argv: Sequence[str], said: str
) -> None:
    start = time.monotonic()
    with pytest.raises(PreflightFailed, match=said):
        ask_driver(argv, 30.0 if "sleep" not in argv[-1] else 0.3)
    assert time.monotonic() - start < 55  # the late one was not waited for


def uuids(*numbers: int) -> list[str]:
    return [f"GPU-0000000{i}-aaaa-bbbb-cccc-000000000000" for i in numbers]


@pytest.mark.parametrize(
    ("mask", "left"),
    [
        (None, uuids(*range(8))),
        ("", []),
        ("-1", []),
        ("0", uuids(0)),
        ("3,1", uuids(3, 1)),
        ("0, 2", uuids(0, 2)),
        ("1,-1,2", uuids(1)),
        ("GPU-00000005", uuids(5)),
        (",".join(uuids(7, 6)), uuids(7, 6)),
    ],
)
def test_masks_of_whole_gpus(mask: str | None, left: list[str]) -> None:
    assert visible(answers(H100), mask) == left


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ("8", "names device 8; there are 8"),
        ("0,0", "twice"),
        ("1,GPU-00000001", "twice"),
        ("GPU-9", "is not on this host"),
        ("GPU-0000000", "could be several"),
        ("all", "no index and no UUID"),
        ("0;1", "no index and no UUID"),
    ],
)
def test_masks_that_name_nothing_sound(mask: str, said: str) -> None:
    with pytest.raises(PreflightFailed, match=said):
        visible(answers(H100), mask)


@pytest.mark.parametrize(
    ("mask", "left"),
    [
        (None, [*MIG, WHOLE]),
        (MIG[1], [MIG[1]]),
        ("0,2", [MIG[0], WHOLE]),
        (f"{WHOLE},{MIG[0]}", [WHOLE, MIG[0]]),
    ],
)
def test_masks_of_split_gpus(mask: str | None, left: list[str]) -> None:
    assert visible(answers(SPLIT, SPLIT_LIST), mask) == left


def test_a_split_gpu_is_not_used_whole() -> None:
    with pytest.raises(PreflightFailed, match="split into slices"):
        visible(answers(SPLIT, SPLIT_LIST), "GPU-5d5ba0d6")


HOST = ["lo", "eth0", "eth1", "ib0", "ib1", "ibs2", "docker0"]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("=eth", []),
        ("ib", ["ib0", "ib1", "ibs2"]),
        ("eth1,ib0", ["eth1", "ib0"]),
        ("=ib1,lo", ["lo", "ib1"]),
        ("^docker,lo", ["eth0", "eth1", "ib0", "ib1", "ibs2"]),
        ("^=eth0,lo", ["eth1", "ib0", "ib1", "ibs2", "docker0"]),
        ("^eth,ib,lo,docker", []),
        ("wlan", []),
    ],
)
def test_interfaces_by_nccls_own_rules(value: str, found: list[str]) -> None:
    assert network.matching(HOST, value) == found


BRIDGED = ["lo", "eth0"]


@pytest.mark.parametrize(
    ("value", "replicas", "is_bridged", "kept"),
    [
        (None, 1, True, None),
        ("", 1, False, None),
        ("eth", 1, True, "eth"),
        ("eth", 3, False, "eth"),
        ("ib", 1, True, None),
    ],
)
def test_what_the_variable_comes_to(
    value: str | None, replicas: int, is_bridged: bool, kept: str | None
) -> None:
    chosen = network.choose(BRIDGED, value, replicas=replicas, is_bridged=is_bridged)
    assert chosen.value == kept
    assert bool(chosen.warning) == (value == "ib")


@pytest.mark.parametrize(
    ("value", "replicas", "is_bridged"),
    [
        ("ib", 1, False),
        ("ib", 2, True),
        ("ib0", 1, True),
        ("=ib", 1, True),
        ("^eth,lo", 1, True),
        ("bond", 1, True),
    ],
)
def test_the_one_fallback_is_the_only_one(value: str, replicas: int, is_bridged: bool) -> None:
    with pytest.raises(PreflightFailed, match="matches none of lo, eth0"):
        network.choose(BRIDGED, value, replicas=replicas, is_bridged=is_bridged)


@pytest.mark.parametrize(
    ("listing", "asked", "settled"),
    [
        (H100, "auto", "flash_3"),
        (A100, "auto", "flash_2"),
        (H100.replace(" 9.0,", " 10.0,"), "auto", "flash_4"),
        (H100.replace(" 9.0,", " 7.5,"), "auto", "sdpa"),
        (H100, "flash_2", "flash_2"),
        (A100, "sdpa", "sdpa"),
    ],
)
def test_attention_of_a_host(listing: str, asked: str, settled: str) -> None:
    assert attention.settle(answers(listing), asked) == settled


@pytest.mark.parametrize(("listing", "asked"), [(H100, "flash_4"), (A100, "flash_3")])
def test_attention_that_the_host_cannot_run(listing: str, asked: str) -> None:
    with pytest.raises(PreflightFailed, match="does not run on NVIDIA"):
        attention.settle(answers(listing), asked)


def lock(**packages: str) -> RuntimeLock:
    return RuntimeLock(
        base=None, platform="linux/amd64", packages=packages, features=(), entry_points={}
    )


def test_what_is_installed_is_compared_with_the_lock() -> None:
    have = {"torch": "2.11.0+cu130", "ray": "2.59.0"}
    check_installed(lock(torch="2.11.0"), have.get)
    with pytest.raises(PreflightFailed, match=r"ray 2\.59\.0 instead of 2\.60\.0.*sglang is miss"):
        check_installed(lock(torch="2.11.0", ray="2.60.0", sglang="0.5"), have.get)


def test_a_full_disk_is_told_before_a_model_is_read(tmp_path: Path) -> None:
    check_space(tmp_path / "run", 0)
    with pytest.raises(PreflightFailed, match="a commit needs"):
        check_space(tmp_path / "run", 2**60)


@pytest.fixture
def plan() -> Plan:
    return make_plan(three_node('launch.cluster="ai2/jupiter"'))


def run(plan: Plan, tmp_path: Path, **changes: object) -> dict[str, str | None]:
    plain: dict[str, object] = {
        "environ": {},
        "root": tmp_path,
        "gpus": lambda: answers(H100),
        "interfaces": lambda: HOST,
        "torch": lambda _: 8,
        "lock": lock(),
    }
    call: Callable[..., dict[str, str | None]] = preflight
    return call(plan.model_copy(update={"memory": None}), **plain | changes)


def test_a_sound_host_hands_the_corrected_environment_on(plan: Plan, tmp_path: Path) -> None:
    settled = run(plan, tmp_path, environ={"NCCL_SOCKET_IFNAME": "ib"})
    assert settled == {"NCCL_SOCKET_IFNAME": "ib"}
    assert run(plan, tmp_path) == {}


def test_a_name_that_is_removed_reaches_no_process(tmp_path: Path) -> None:
    alone = make_plan(three_node("launch.replicas=1", "rollout.engines=1", "rollout.tensor=4",
                                 "core.tensor=1", "core.context=1", "core.expert=1",
                                 "core.max_tokens_per_gpu=17408"))  # fmt: skip
    environ = {"NCCL_SOCKET_IFNAME": "ib", "KEPT": "1"}
    seen: list[dict[str, str]] = []

    def torch(given: dict[str, str]) -> int:
        seen.append(given)
        return 8

    settled = run(alone, tmp_path, environ=environ, interfaces=lambda: ["lo", "eth0"], torch=torch)
    assert corrected(environ, settled) == {"KEPT": "1"}
    assert seen == [{"KEPT": "1"}]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"environ": {"NCCL_SOCKET_IFNAME": "bond"}}, "matches none"),
        ({"environ": {"CUDA_VISIBLE_DEVICES": "0,1"}}, "shows 2 GPUs, the plan divides 8"),
        ({"gpus": lambda: answers(A100)}, "does not run on NVIDIA A100"),
        ({"torch": lambda _: 7}, "torch sees 7 GPUs"),
        ({"lock": lock(nothing="1")}, "nothing is missing"),
    ],
)
def test_the_first_thing_that_cannot_work_ends_the_start(
    plan: Plan, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(PreflightFailed, match=said):
        run(plan, tmp_path, **changes)


def test_names_come_before_gpus_and_gpus_before_torch(plan: Plan, tmp_path: Path) -> None:
    order: list[str] = []

    def note(name: str, answer: object) -> Callable[..., object]:
        return lambda *_: (order.append(name), answer)[1]

    run(
        plan,
        tmp_path,
        interfaces=note("names", HOST),
        gpus=note("gpus", answers(H100)),
        torch=note("torch", 8),
    )
    assert order == ["names", "gpus", "torch"]
