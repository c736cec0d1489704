"""Buckets in our own form, as the plugin takes them in a server's process: real gloo, no SGLang."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed import BroadcastOptions

from runtime.engines.collective import CollectiveGroup
from runtime.engines.own_format import broadcast_format, is_broadcast, sizes_of
from runtime.engines.protocol import EngineInfo
from runtime.engines.sglang.inside import loading
from runtime.engines.sglang.inside.checksums import Held
from runtime.errors import EngineRefused
from runtime.policy import PolicyId
from runtime.publication.broadcast import BroadcastTransport
from runtime.publication.checksum import checksums
from runtime.publication.ipc import IpcTransport
from runtime.publication.protocol import Target
from tests.runtime.publication.real_engines import ModelTrainer


class QKVParallelLinear(nn.Module):
    """A fused layer, as the server names it and its sizes."""

    q_proj_shard_size, kv_proj_shard_size, num_kv_head_replicas = 4, 2, 1

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3))


class Served(nn.Module):
    """A server's model: fused where the trainer's is not."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"qkv_proj": QKVParallelLinear()})
        self.norm = nn.Linear(5, 3)
        self.by_loader: list[str] = []

    def load_weights(self, named: Any) -> None:
        named = list(named)
        self.by_loader += [name for name, _ in named]
        places = Held.by(self).tensors
        with torch.no_grad():
            for name, tensor in named:
                places[name].copy_(tensor)

    def held(self) -> dict[str, str]:
        return checksums(Held.by(self).tensors.items())


class Qwen3ForCausalLM(Served):
    """Of a name that is known to derive nothing from its weights."""


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        names = {"q_proj": (4, 3), "k_proj": (2, 3), "v_proj": (2, 3)}
        self.attention = nn.ModuleDict()
        for name, shape in names.items():
            self.attention[name] = nn.Linear(shape[1], shape[0], bias=False)
        self.norm = nn.Linear(5, 3)


def older() -> type:
    """The part of 0.5.17 that the plugin hooks into; ``refuses`` is what it says to any load."""

    class WeightUpdater:
        def update_weights_from_distributed(
            self, names: Any, dtypes: Any, shapes: Any, group_name: str, load_format: Any = None
        ) -> tuple[bool, str]:
            assert not names, "a call in our form is ours"
            assert group_name in self._model_update_group
            return self.refuses or (True, "")

        def update_weights_from_tensor(self, named_tensors: Any, load_format: Any = None) -> Any:
            assert not named_tensors
            return self.refuses or (True, "")

    return WeightUpdater


def newer() -> type:
    """The same of 0.5.23, which receives and loads apart."""

    class WeightUpdater(older()):
        update_weights_from_distributed = None

        def receive_weights_from_distributed(self, **told: Any) -> Any:
            raise AssertionError("a call in our form is ours")

        def load_weights_from_distributed(self, named_tensors: Any) -> tuple[bool, str]:
            assert not named_tensors
            return self.refuses or (True, "")

    return WeightUpdater


def hooked(make: Callable[[], type], model: nn.Module) -> Any:
    updater = make()
    loading.hook_loading(SimpleNamespace(WeightUpdater=updater))
    made = updater()
    made.device, made._model_update_group, made.refuses = "cpu", {}, None
    made.get_model = lambda: model
    return made


class PluginClient:
    """An engine whose process is a thread: what its HTTP calls would do, done by the hooks."""

    def __init__(self, updater: Any) -> None:
        self.updater = updater
        self.calls: list[list[int]] = []
        self.shared: list[tuple[int, bool]] = []

    async def info(self) -> EngineInfo:
        return EngineInfo(
            version="x", vocab_size=8, context_length=8, max_running_requests=1,
            native_spans=False, takes_salt=True, update_bracket=False, own_buckets=True,
            own_broadcast=True,
        )  # fmt: skip

    async def begin_update(self) -> None: ...

    async def end_update(self) -> None: ...

    async def init_update_group(self, **plan: Any) -> None:
        plan["rank"] = plan.pop("rank_offset")
        self.updater._model_update_group[plan["name"]] = await anyio.to_thread.run_sync(
            lambda: CollectiveGroup(**plan, timeout_s=30.0)
        )

    async def destroy_update_group(self, name: str) -> None:
        self.updater._model_update_group.pop(name).close()

    async def update_from_distributed(
        self, specs: Any, *, group: str, policy: Any, flush: bool, flat: bool, sizes: Any
    ) -> None:
        self.calls.append(list(sizes))
        told = {
            "names": [s.name for s in specs], "dtypes": [s.dtype for s in specs],
            "shapes": [list(s.shape) for s in specs], "group_name": group,
            "load_format": broadcast_format(sizes),
        }  # fmt: skip
        is_good, message = await anyio.to_thread.run_sync(self._take, told)
        if not is_good:
            raise EngineRefused(message)

    async def update_from_shared(self, *buckets: Any, flush: bool) -> None:
        self.shared.append((len(buckets), flush))

    def _take(self, told: dict[str, Any]) -> tuple[bool, str]:
        updater = self.updater
        if hasattr(updater, "receive_weights_from_distributed"):
            return updater.load_weights_from_distributed(
                updater.receive_weights_from_distributed(**told)
            )
        return updater.update_weights_from_distributed(*told.values())


@pytest.fixture(autouse=True)
def plain_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's groups are torch's registered ones; ours are the same without the registry."""

    def broadcast(tensor: torch.Tensor, src: int, group: Any, async_op: bool) -> Any:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        return group._group.broadcast([tensor], options)

    monkeypatch.setattr(loading.dist, "broadcast", broadcast)


@pytest.mark.parametrize("keep_bytes", [0, 10**6])
@pytest.mark.parametrize("make", [older, newer])
@pytest.mark.parametrize("kind", [Qwen3ForCausalLM, Served])
def test_one_call_brings_all_buckets_to_every_engine(kind: Any, make: Any, keep_bytes: int) -> None:
    """Also what only the model's own loader may write; also weights that were not kept."""

    async def main() -> None:
        trainer = ModelTrainer(Trained(), bucket_bytes=60)
        trainer.sender._keep_bytes = keep_bytes
        models = [kind(), kind()]
        targets = [
            Target(slot=slot, incarnation="i", client=PluginClient(hooked(make, model)))  # type: ignore[arg-type]
            for slot, model in enumerate(models)
        ]
        transport = BroadcastTransport(trainer, group_timeout_s=30.0)
        for update in (1, 2):
            trainer.train()
            snapshot = await transport.prepare(PolicyId(1, update))
            outcomes = await transport.transfer(snapshot, targets, flush=False, deadline_s=60)
            assert [outcome.error for outcome in outcomes] == [None, None]
            for model in models:
                assert model.held() == snapshot.digests["sha256"]
        assert transport.num_groups == 1
        for target, model in zip(targets, models, strict=True):
            assert target.client.calls == [[1, 2, 1, 1]] * 2  # type: ignore[attr-defined]
            assert bool(model.by_loader) == (kind is Served)
        await transport.close()

    anyio.run(main)


class Odd(nn.Module):
    """Half as wide and of odd length first: nothing after it begins where its dtype may."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(5))


Llama = type("LlamaForCausalLM", (Odd,), {})


def test_tensors_of_several_dtypes_arrive_in_one_bucket() -> None:
    async def main() -> None:
        trainer, model = ModelTrainer(Odd()), Llama()
        client: Any = PluginClient(hooked(newer, model))
        transport = BroadcastTransport(trainer, group_timeout_s=30.0)
        snapshot = await transport.prepare(PolicyId(1, 1))
        (outcome,) = await transport.transfer(
            snapshot, [Target(slot=0, incarnation="i", client=client)], flush=False, deadline_s=60
        )
        assert outcome.error is None
        assert client.calls == [[2]]
        assert checksums(Held.by(model).tensors.items()) == snapshot.digests["sha256"]
        await transport.close()

    anyio.run(main)


@pytest.mark.parametrize("make", [older, newer])
def test_a_refusal_is_told_and_the_next_publication_goes_through(make: Any) -> None:
    async def main() -> None:
        trainer = ModelTrainer(Trained(), bucket_bytes=60)
        model = Qwen3ForCausalLM()
        client = PluginClient(hooked(make, model))
        client.updater.refuses = (False, "not now")
        targets = [Target(slot=0, incarnation="i", client=client)]  # type: ignore[arg-type]
        transport = BroadcastTransport(trainer, group_timeout_s=30.0)
        snapshot = await transport.prepare(PolicyId(1, 1))
        before = model.held()
        (outcome,) = await transport.transfer(snapshot, targets, flush=False, deadline_s=60)
        assert outcome.error == "not now"
        assert model.held() == before
        client.updater.refuses = None
        (outcome,) = await transport.transfer(snapshot, targets, flush=False, deadline_s=60)
        assert outcome.error is None
        assert model.held() == snapshot.digests["sha256"]
        await transport.close()

    anyio.run(main)


@pytest.mark.parametrize(("told", "why"), [
    ("milepost:2", "1 tensors"), ("milepost:0,1", "without tensors"), ("milepost:x", "invalid"),
])  # fmt: skip
@pytest.mark.parametrize("make", [older, newer])
def test_buckets_that_do_not_come_out_are_refused_before_anything_arrives(
    make: Any, told: str, why: str
) -> None:
    client = PluginClient(hooked(make, Qwen3ForCausalLM()))
    client.updater._model_update_group["g"] = object()  # nothing could arrive over it
    call = {
        "names": ["norm.bias"], "dtypes": ["float32"], "shapes": [[3]], "group_name": "g",
        "load_format": told,
    }  # fmt: skip
    if make is newer:  # upstream answers what its receiver raises
        with pytest.raises(ValueError, match=why):
            client._take(call)
    else:
        is_good, message = client._take(call)
        assert not is_good
        assert why in message


def test_a_parameter_that_lies_elsewhere_is_found_there() -> None:
    """Verification and loading must speak of what is served, whatever was kept."""
    model = Qwen3ForCausalLM()
    before = model.held()
    model.norm.weight = nn.Parameter(torch.ones(3, 5))
    model.attention["qkv_proj"].weight.data = torch.zeros(8, 3)
    after = model.held()
    assert {n for n in after if after[n] != before[n]} == set(after) - {"norm.bias"}
    new = [("norm.weight", torch.full((3, 5), 7.0))]
    loading.load_bucket(model, new, loading.places_of(model))
    assert model.norm.weight.eq(7).all()
    assert not model.by_loader


@pytest.mark.parametrize("tensor", [
    torch.zeros(5, 3), torch.zeros(3, 5, dtype=torch.float64),
])  # fmt: skip
def test_what_does_not_lie_as_it_came_goes_through_the_models_loader(tensor: torch.Tensor) -> None:
    model = Qwen3ForCausalLM()
    model.load_weights = lambda named: model.by_loader.extend(name for name, _ in named)  # type: ignore[method-assign]
    places = loading.places_of(model)
    loading.load_bucket(model, [("norm.bias", torch.zeros(3)), ("norm.weight", tensor)], places)
    loading.load_bucket(model, [("unknown", tensor)], places)
    assert model.by_loader == ["norm.bias", "norm.weight", "unknown"]


def test_one_call_tells_of_all_shared_buckets(tmp_path: Path) -> None:
    async def main() -> None:
        client: Any = PluginClient(None)
        transport = IpcTransport(ModelTrainer(Trained(), bucket_bytes=60), tmp_path)
        snapshot = await transport.prepare(PolicyId(1, 1))
        (outcome,) = await transport.transfer(
            snapshot, [Target(slot=0, incarnation="i", client=client)], flush=True, deadline_s=60
        )
        assert outcome.error is None
        assert client.shared == [(4, True)]
        await transport.close()

    anyio.run(main)


def test_shared_buckets_are_opened_once_and_read_where_they_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[int] = []
    memory = torch.zeros(80, dtype=torch.uint8)

    def opens(cuda: Any, num_bytes: int) -> torch.Tensor:
        opened.append(num_bytes)
        return memory[:num_bytes]

    monkeypatch.setattr(loading, "_opened", opens)
    model = Qwen3ForCausalLM()
    updater = hooked(older, model)
    tensors = [("norm.weight", "float32", (3, 5), 16, 76), ("norm.bias", "float32", (3,), 0, 12)]
    buckets = {"buckets": [{"cuda": ("GPU", b"h"), "num_bytes": 76, "tensors": tensors}]}
    for value in (1.0, 2.0):
        memory[:76].view(torch.float32).fill_(value)
        assert updater.update_weights_from_tensor(buckets, "milepost")[0] is True
        assert model.norm.weight.eq(value).all()
        assert model.norm.bias.eq(value).all()
    buckets["buckets"][0]["tensors"] = [("norm.weight", "float32", (3, 5), 0, 60)]
    memory[:60].view(torch.float32).fill_(3.0)
    assert updater.update_weights_from_tensor(buckets, "milepost")[0] is True
    assert (model.norm.weight.eq(3).all(), model.norm.bias.eq(2).all()) == (True, True)
    assert opened == [76]
    updater.refuses = (False, "not now")
    memory.fill_(0)
    assert updater.update_weights_from_tensor(buckets, "milepost") == (False, "not now")
    assert model.norm.bias.eq(2).all()


@given(st.lists(st.integers(1, 10**6), min_size=1))
def test_both_sides_agree_on_the_buckets(sizes: list[int]) -> None:
    announced = broadcast_format(sizes)
    assert is_broadcast(announced)
    assert sizes_of(announced) == sizes


@pytest.mark.parametrize("theirs", [None, "flattened_bucket", "milepost", "direct"])
def test_other_calls_are_not_ours(theirs: str | None) -> None:
    assert not is_broadcast(theirs)
