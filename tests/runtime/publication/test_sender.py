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
    tensors = [
        torch.randn(3, 4), torch.randn(4, 3).t(), torch.randn(3).to(torch.bfloat16),
        torch.randn(5), torch.randn(()), torch.randn(0),
    ]  # fmt: skip
    packed = Packed.of(tensors)
    assert packed.flat.numel() == sum(t.nbytes for t in tensors)
    for found, tensor in zip(packed.tensors(), tensors, strict=True):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


class Sent:
    """A group that notes what it is given, or says that a peer is gone."""

    def __init__(self, error: str | None = None) -> None:
        self.error = error
        self.flats: list[list[list[float]]] = []

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        if self.error:
            raise RuntimeError(self.error)
        self.flats.append([tensor.view(torch.float32).tolist() for tensor in tensors])

    def close(self) -> None: ...


def sender_to(export: Export, group: Sent, **settings: int) -> BroadcastSender:
    sender = BroadcastSender(export, **settings)
    sender._group = group  # type: ignore[assignment]
    return sender


def no_memory(tensors: list[torch.Tensor]) -> Packed:
    raise torch.OutOfMemoryError("no memory for a copy")


EACH = [[float(i)] * 4 for i in range(3)]


def test_what_has_no_memory_to_be_packed_is_packed_as_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The siblings keep nothing and walk no more: this rank must not fall back to the export."""
    export, group = Export(), Sent()
    sender = sender_to(export, group, keep_bytes=48)
    with monkeypatch.context() as patch:
        patch.setattr(Packed, "of", no_memory)
        sender.describe()
    sender.send_bucket(0, True, 3)
    assert group.flats == [[each] for each in EACH]  # one copy at a time
    assert len(export.walked) == 3


@pytest.mark.parametrize("keep_bytes", [0, 48])
def test_no_memory_to_send_is_an_error_after_all_of_the_export(
    monkeypatch: pytest.MonkeyPatch, keep_bytes: int
) -> None:
    export, group = Export(), Sent()
    sender = sender_to(export, group, keep_bytes=keep_bytes)
    monkeypatch.setattr(Packed, "of", no_memory)
    sender.describe()
    export.walked.clear()
    with pytest.raises(RuntimeError, match="no memory for a copy"):
        sender.send_bucket(0, True, 3)
    assert len(export.walked) == (0 if keep_bytes else 3)
    assert not group.flats


def test_the_first_error_is_told_when_the_export_breaks_after_it() -> None:
    """Else a broken collective would pass for weights that cannot be trusted."""
    export = Export()
    sender = sender_to(export, Sent("a peer is gone"))
    del export.tensors[1:]
    with pytest.raises(RuntimeError, match="a peer is gone"):
        sender.send_bucket(0, True, 3)


def test_nothing_is_kept_once_the_weights_change() -> None:
    """What changes them needs the memory; all ranks walk through the export again."""
    export, group = Export(), Sent()
    sender = sender_to(export, group, keep_bytes=48)
    sender.describe()
    sender.send_bucket(0, True, 3)
    sender.forget()
    assert sender._kept is None
    sender.send_bucket(0, True, 3)
    assert group.flats == [EACH, *([each] for each in EACH)]
    assert len(export.walked) == 6
