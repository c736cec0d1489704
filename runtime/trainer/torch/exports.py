"""How weights leave a rank: one by one, in buckets; all of them, adapters alone, or their base."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from runtime.engines.protocol import TensorSpec
from runtime.publication.peft import WEIGHTS
from runtime.trainer.settings import LoraSettings
from runtime.trainer.torch.lora import write_config
from runtime.trainer.torch.weights import Weights


def in_buckets(
    named: Iterable[tuple[str, Tensor]], bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive tensors in lists of at most ``bucket_bytes``; a larger tensor comes alone."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterExport:
    """Adapters in peft's names; ``runtime.publication.snapshot.WeightExport`` of them alone."""

    weights: Weights
    settings: LoraSettings
    base: str
    """Model folder the adapters belong to."""

    def weight_specs(self) -> list[TensorSpec]:
        """Names, dtypes and shapes in export order."""
        return self.weights.adapter_specs()

    def export_weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Whole adapters in buckets; collective."""
        return in_buckets(self.weights.adapter_tensors(), bucket_bytes)

    def finish(self, folder: Path) -> None:
        """Make a written snapshot a folder that peft reads: its file name, its config."""
        (folder / "model.safetensors").rename(folder / WEIGHTS)
        names = [spec.name.split(".") for spec in self.weight_specs()]
        whole = {parts[-2] for parts in names if parts[-2] not in ("lora_A", "lora_B")}
        write_config(folder, self.settings, self.base, whole_modules=sorted(whole))


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseExport:
    """What lies under the adapters and never changes: a ``WeightExport`` to take digests of."""

    weights: Weights

    def weight_specs(self) -> list[TensorSpec]:
        """Names, dtypes and shapes in export order."""
        return self.weights.base_specs()

    def export_weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Whole weights in buckets; collective."""
        return in_buckets(self.weights.base_tensors(), bucket_bytes)
