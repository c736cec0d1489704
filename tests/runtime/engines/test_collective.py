"""The broadcast group beside torch.distributed, and against the helper that SGLang uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from runtime.engines.collective import CollectiveGroup
from runtime.engines.held_port import HeldPort
from runtime.errors import UnavailableFeature


@pytest.fixture
def port() -> Iterator[int]:
    with HeldPort() as held:
        yield held.port


def join(rank: int, port: int, world_size: int = 2, timeout_s: float = 20) -> CollectiveGroup:
    return CollectiveGroup(
        host="127.0.0.1", port=port, rank=rank, world_size=world_size, name="g", timeout_s=timeout_s
    )


def both(*sides: Callable[[], object]) -> list[object]:
    with ThreadPoolExecutor(len(sides)) as threads:
        return [f.result(30) for f in [threads.submit(side) for side in sides]]


def test_broadcast_of_several_dtypes_without_a_default_group(port: int):
    sent = [torch.randn(3, 4), torch.arange(5), torch.randn(7).bfloat16()]
    sender, receiver = both(lambda: join(0, port), lambda: join(1, port))
    assert isinstance(sender, CollectiveGroup)
    assert isinstance(receiver, CollectiveGroup)
    _, found = both(
        lambda: sender.broadcast(sent),
        lambda: receiver.receive([(tuple(t.shape), t.dtype) for t in sent]),
    )
    torch.testing.assert_close(found, sent, atol=0, rtol=0)
    assert not dist.is_initialized()
    sender.close()
    receiver.close()


def test_a_group_made_the_way_sglang_makes_its_own_meets_ours(port: int):
    """sglang.srt.utils' init_custom_process_group: rendezvous, PrefixStore, torch's own helper."""
    from torch.distributed import PrefixStore
    from torch.distributed.distributed_c10d import _new_process_group_helper
    from torch.distributed.rendezvous import rendezvous

    sent = torch.randn(4)

    def theirs() -> object:
        timeout = timedelta(seconds=20)
        store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=timeout))
        group, _ = _new_process_group_helper(
            size, rank, [], "gloo", PrefixStore("g", store), group_name="g", timeout=timeout
        )
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        group.broadcast([sent.clone()], options).wait()
        return store, group

    def ours() -> object:
        return join(1, port).receive([((4,), torch.float32)])

    _, found = both(theirs, ours)
    torch.testing.assert_close(found, [sent], atol=0, rtol=0)


def test_a_peer_that_never_comes_is_an_error_within_the_timeout(port: int):
    with pytest.raises(RuntimeError):
        join(0, port, timeout_s=0.2)


def test_closing_ends_a_receive_that_waits(port: int):
    sender, receiver = both(lambda: join(0, port), lambda: join(1, port))
    assert isinstance(sender, CollectiveGroup)
    assert isinstance(receiver, CollectiveGroup)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: receiver.receive([((4,), torch.float32)]))
        sender.close()
        receiver.close()
        with pytest.raises(RuntimeError):
            waiting.result(30)


def test_other_backends_are_not_there_yet():
    with pytest.raises(UnavailableFeature, match="nccl"):
        CollectiveGroup(
            host="127.0.0.1", port=1, rank=0, world_size=1, name="g", backend="nccl", timeout_s=1
        )
