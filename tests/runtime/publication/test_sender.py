"""The sender alone: what its ranks do together stays together, whatever becomes of the group."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch

from runtime.engines.protocol import TensorSpec
from runtime.errors import ContractViolation
from runtime.publication.groups import GroupPlan
from runtime.publication.safetensors_file import spec_of
from runtime.publication.sender import BroadcastSender, Packed


class Export:
    """Counts how far its walk has come: under FSDP each step of it is a collective."""

    def __init__(self) -> None:
        self.tensors = [(f"w{i}", torch.full((4,), float(i))) for i in range(3)]
        self.walked: list[str] = []

    def weight_specs(self) -> list[TensorSpec]:
        return [spec_of(name, tensor) for name, tensor in self.tensors]

    def export_weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        for name, tensor in self.tensors:
            self.walked.append(name)
            yield [(name, tensor)]


def test_a_bucket_without_a_group_fails_after_its_part_of_the_export() -> None:
    """An abort may come before the call: the siblings are in the export already."""
    exports = [Export(), Export()]
    first, sibling = (BroadcastSender(e, rank=rank) for rank, e in enumerate(exports))
    sibling.send_bucket(0)
    with pytest.raises(RuntimeError, match="no group"):
        first.send_bucket(0)
    assert exports[0].walked == exports[1].walked == ["w0"]
    for sender in (first, sibling):
        with pytest.raises(ContractViolation, match="out of turn"):
            sender.send_bucket(2)


@pytest.mark.parametrize("keep_bytes", [0, 48])
def test_many_buckets_without_a_group_fail_after_all_of_the_export(keep_bytes) -> None:
    exports = [Export(), Export()]
    first, sibling = (
        BroadcastSender(e, rank=rank, keep_bytes=keep_bytes) for rank, e in enumerate(exports)
    )
    for sender in (first, sibling):
        sender.describe()
    sibling.send_bucket(0, True, 3)
    with pytest.raises(RuntimeError, match="no group"):
        first.send_bucket(0, True, 3)
    assert exports[0].walked == exports[1].walked


def test_nobody_gets_the_port_of_a_group_between_its_choice_and_its_store() -> None:
    sender = BroadcastSender(Export())
    port = sender.free_port("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    plan = GroupPlan(
        name="g", host="127.0.0.1", port=port, backend="gloo", members=(), ranks_per_engine=1
    )
    sender.open_group(plan, timeout_s=20)
    socket.create_connection(("127.0.0.1", port), timeout=20).close()  # the store listens
    assert sender._port is None
    sender.abort()


def test_a_port_that_no_group_came_for_is_let_go() -> None:
    sender = BroadcastSender(Export())
    sender.free_port("127.0.0.1")
    first = sender._port
    sender.free_port("127.0.0.1")
    assert first is not None
    assert first._socket is None
    assert sender._port is not first


def test_a_late_call_leaves_the_port_of_the_next_group_alone() -> None:
    sender = BroadcastSender(Export())
    late = GroupPlan(
        name="g",
        host="127.0.0.1",
        port=sender.free_port("127.0.0.1"),
        backend="gloo",
        members=(),
        ranks_per_engine=1,
    )
    after = sender.free_port("127.0.0.1")
    sender.open_group(late, timeout_s=20)
    sender.abort()
    assert sender._port is not None
    assert sender._port.port == after
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", after))


@pytest.mark.parametrize(("keep_bytes", "walks"), [(48, 1), (47, 2)])
def test_small_weights_are_gathered_once_and_sent_from_what_was_kept(keep_bytes, walks) -> None:
    """All ranks decide alike: one that walked while its siblings do not would wait for ever."""
    exports = [Export(), Export()]
    senders = [BroadcastSender(e, rank=r, keep_bytes=keep_bytes) for r, e in enumerate(exports)]
    sent: list[list[torch.Tensor]] = []

    class Group:
        def broadcast(self, tensors: list[torch.Tensor]) -> None:
            sent.append(tensors)

        def close(self) -> None: ...

    senders[0]._group = Group()  # type: ignore[assignment]
    described = [sender.describe() for sender in senders]
    assert described[0] == described[1]
    for index in range(3):
        for sender in senders:
            sender.send_bucket(index, index == 2)
    assert [len(export.walked) for export in exports] == [3 * walks, 3 * walks]
    assert [t.tolist() for (t,) in sent[:2]] == [[0.0] * 4, [1.0] * 4]
    assert sent[2][0].view(torch.float32).tolist() == [2.0] * 4
    for sender in senders:
        with pytest.raises(ContractViolation):
            sender.send_bucket(5)


def test_what_was_packed_is_found_again_tensor_by_tensor() -> None:
    """Engines that take no runs of bytes are sent these."""
    tensors = [torch.randn(3, 4), torch.randn(4, 3).t(), torch.randn(4).to(torch.bfloat16)]
    packed = Packed.of(tensors)
    assert packed.flat.numel() == sum(t.nbytes for t in tensors)
    for found, tensor in zip(packed.tensors(), tensors, strict=True):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
