"""Buckets in our own form: written where they belong in one launch, while the next one arrives.

Upstream takes one bucket a call and gives its tensors one by one to the model's loader, which looks
up the place of each anew: at a billion bytes that takes ten times what the copying does, and
requests wait for it. Where weights lie is known here by HF name (``checksums.Held``), so a bucket
is one copy. What cannot be written so, for its shape, dtype, model or ranks, goes through
the model's loader as before. A publication verifies either by the bytes that are held afterwards.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from runtime.engines.own_format import NAME, is_broadcast, sizes_of
from runtime.engines.sglang.inside.checksums import Held, world
from runtime.engines.sglang.inside.plugin import wrap
from runtime.engines.sglang.inside.timing import Timing

PLAIN = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Models that serve their parameters as the HF folder has them and derive nothing from them."""

_AHEAD = 2
"""Buckets of a broadcast that may have arrived or be on their way: one is written, one arrives."""
_MAX_OPEN = 64
"""Buckets of the trainer's device memory that are kept open; the oldest is closed."""

Named = Sequence[tuple[str, torch.Tensor]]
Specs = Sequence[tuple[str, str, Sequence[int]]]
"""Name, dtype and shape of each tensor."""


def hook_loading(updater: Any) -> None:
    """Take calls in our form; all others go on as they did.

    Args:
        updater: module ``sglang.srt.model_executor.model_runner_components.weight_updater``.
    """
    found = updater.WeightUpdater
    wrap(found, "update_weights_from_tensor", _shared)
    if hasattr(found, "receive_weights_from_distributed"):
        # Newer versions receive once and load into each of their models.
        wrap(found, "receive_weights_from_distributed", _announced)
        wrap(found, "load_weights_from_distributed", _arrived)
    else:
        wrap(found, "update_weights_from_distributed", _broadcast)


# --- Broadcast --------------------------------------------------------------------------------


class Arriving:
    """The buckets of one broadcast, received as they are asked for, one ahead."""

    def __init__(
        self,
        group: Any,
        device: Any,
        specs: Specs,
        sizes: Sequence[int],
    ) -> None:
        if sum(sizes) != len(specs):
            raise ValueError(f"{len(specs)} tensors are announced and {sum(sizes)} in buckets")
        self._group, self._device = group, torch.device(device)
        at = iter(specs)
        self._buckets = [[next(at) for _ in range(size)] for size in sizes]

    def __iter__(self) -> Iterator[Named]:
        ahead: deque[_Arrival] = deque()
        for specs in self._buckets:
            ahead.append(self._receive(specs))
            if len(ahead) == _AHEAD:
                yield ahead.popleft().named()
        while ahead:
            yield ahead.popleft().named()

    def _receive(self, specs: Specs) -> _Arrival:
        """Begin to receive one bucket: its bytes without gaps."""
        num_bytes = sum(getattr(torch, d).itemsize * math.prod(shape) for _, d, shape in specs)
        flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        return _Arrival(work, flat, specs)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """One bucket on its way."""

    work: Any
    flat: torch.Tensor
    specs: Specs

    def named(self) -> Named:
        """Its tensors, once they are there."""
        self.work.wait()
        found: list[tuple[str, torch.Tensor]] = []
        at = 0
        for name, told, shape in self.specs:
            dtype: torch.dtype = getattr(torch, told)
            part = self.flat[at : at + dtype.itemsize * math.prod(shape)]
            # Without gaps a tensor may begin where its dtype cannot.
            aligned = part.clone() if at % dtype.itemsize else part
            found.append((name, aligned.view(dtype).view(tuple(shape))))
            at += part.numel()
        return found


def _arriving(
    updater: Any, names: Any, dtypes: Any, shapes: Any, group: str, load_format: str
) -> Arriving:
    """What was announced, of which nothing is received yet.

    Raises:
        RuntimeError: where no such group was joined.
        ValueError: if the buckets do not come out.
    """
    joined = updater._model_update_group.get(group)
    if joined is None:
        raise RuntimeError(f"group {group} was not joined")
    specs = list(zip(names, dtypes, shapes, strict=True))
    return Arriving(joined, updater.device, specs, sizes_of(load_format))


def _broadcast(original: Any) -> Any:
    @functools.wraps(original)
    def update(
        self: Any, names: Any, dtypes: Any, shapes: Any, group_name: str, load_format: Any = None
    ) -> Any:
        if not is_broadcast(load_format):
            return original(self, names, dtypes, shapes, group_name, load_format)
        refused = _refusal(lambda: original(self, [], [], [], group_name, None))
        if refused is not None:
            return refused
        return _load(
            self,
            "broadcast",
            lambda: _arriving(self, names, dtypes, shapes, group_name, load_format),
        )

    return update


def _announced(original: Any) -> Any:
    @functools.wraps(original)
    def receive(self: Any, **told: Any) -> Any:
        if not is_broadcast(told.get("load_format")):
            return original(self, **told)
        names, dtypes, shapes = told["names"], told["dtypes"], told["shapes"]
        return _arriving(self, names, dtypes, shapes, told["group_name"], told["load_format"])

    return receive


def _arrived(original: Any) -> Any:
    @functools.wraps(original)
    def load(self: Any, named_tensors: Any) -> Any:
        if not isinstance(named_tensors, Arriving):
            return original(self, named_tensors)
        refused = _refusal(lambda: original(self, []))
        if refused is not None:
            return refused
        return _load(self, "broadcast", lambda: named_tensors)

    return load


# --- Shared device memory ---------------------------------------------------------------------


def _shared(original: Any) -> Any:
    open_buckets = OpenBuckets()

    @functools.wraps(original)
    def update(self: Any, named_tensors: Any, load_format: Any = None) -> Any:
        if load_format != NAME:
            return original(self, named_tensors, load_format)
        refused = _refusal(lambda: original(self, [], None))
        if refused is not None:
            return refused
        return _load(self, "ipc", lambda: map(open_buckets.named, named_tensors["buckets"]))

    return update


class OpenBuckets:
    """The trainer's buckets that were opened before: opening and closing one waits for the device.

    What is kept open stays allocated even when the trainer lets go of it, which it does not during
    a run: its buckets are written over.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[Any, ...], tuple[Any, torch.Tensor, Named]] = OrderedDict()

    def named(self, bucket: Mapping[str, Any]) -> Named:
        """Its tensors, where they lie."""
        key = (*bucket["cuda"], bucket["num_bytes"])
        layout, flat, named = self._open.pop(key, (None, None, ()))
        if flat is None:
            flat = _opened(bucket["cuda"], bucket["num_bytes"])
        if layout != bucket["tensors"]:
            layout = bucket["tensors"]
            named = [
                (name, flat[start:end].view(getattr(torch, dtype)).view(tuple(shape)))
                for name, dtype, shape, start, end in layout
            ]
        self._open[key] = layout, flat, named
        while len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)
        return named


def _opened(cuda: Sequence[Any], num_bytes: int) -> torch.Tensor:
    device, handle, storage_bytes, storage_offset, counter, counter_offset, event, waits = cuda
    patch = import_module("sglang.srt.utils.patch_torch")
    return patch._rebuild_cuda_tensor_modified(
        torch.Tensor, (num_bytes,), (1,), 0, torch.storage.TypedStorage, torch.uint8,
        device, handle, storage_bytes, storage_offset, False,
        counter, counter_offset, event, waits,
    )  # fmt: skip


# --- Both -------------------------------------------------------------------------------------


def _refusal(nothing: Callable[[], Any]) -> Any:
    """What upstream says about loading nothing: None, or why it would not load."""
    try:
        answer = nothing()
    except Exception as error:
        return False, f"Failed to update parameter online: {error}."
    return None if answer[0] else answer


def _load(updater: Any, way: str, buckets: Callable[[], Iterable[Named]]) -> tuple[bool, str]:
    """Write all buckets; returns when the device has, so that the answer says what is held."""
    model = updater.get_model()
    on_gpu = torch.device(updater.device).type == "cuda"
    try:
        with Timing(f"load.{way}") as timing:
            if on_gpu:
                # Forward passes run on a stream of their own: none may read what is written now.
                torch.cuda.synchronize()
            with torch.no_grad():
                places = places_of(model)
                for named in buckets():
                    load_bucket(model, named, places)
                    del named  # its memory is the next bucket's
            timing.queued()
            if on_gpu:
                torch.cuda.current_stream().synchronize()
    except Exception as error:
        return False, (
            f"Failed to update parameter online: {error}. "
            "The full weights of the ModelRunner are partially updated."
        )
    return True, "Succeeded to update parameter online."


def load_bucket(model: Any, named: Named, places: Mapping[str, torch.Tensor]) -> None:
    """Write some weights, by HF name; ``places``: of that model."""
    if all(_fits(places.get(name), tensor) for name, tensor in named):
        # One launch for the bucket; torch has no public name for it.
        copy_all: Any = getattr(torch, "_foreach_copy_")  # noqa: B009
        copy_all([places[name] for name, _ in named], [tensor for _, tensor in named])
    else:
        model.load_weights(named)


def _fits(place: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    return (
        place is not None
        and place.shape == tensor.shape
        and place.dtype == tensor.dtype
        and place.device == tensor.device
    )


def places_of(model: Any) -> dict[str, torch.Tensor]:
    """Where each weight lies, by HF name; nothing where only the model's own loader may write."""
    if type(model).__name__ not in PLAIN or world() > 1:
        return {}
    return Held.by(model).tensors
