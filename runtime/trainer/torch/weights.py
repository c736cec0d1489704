"""The weights of one rank: what the forward pass reads, what the optimizer changes, what leaves.

Masters are plain fp32 tensors in all cases. fp32 alone: the model's own parameters. bf16 alone: the
model holds bf16, masters lie beside it (``LongWeights``), and a gradient moves to its master as
soon as the layer's backward is done, so accumulation is in fp32. More ranks: FSDP2 keeps fp32
shards and casts when it gathers; a master is this rank's shard, the same memory, since AdamW works
element by element.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from runtime.engines.protocol import TensorSpec
from runtime.trainer.settings import LoraSettings
from runtime.trainer.torch.long import LongWeights
from runtime.trainer.torch.lora import adapted, adapter_parts, is_adapter, merged, whole
from runtime.trainer.torch.projections import join_weights
from runtime.trainer.torch.ranks import Ranks
from runtime.trainer.torch.scorer import PackedScorer


class Weights:
    """Parameters of a scorer that train, and their fp32 masters, by HF name.

    With adapters only these train: ``names``, ``params`` and ``masters`` are theirs.
    """

    def __init__(
        self,
        scorer: PackedScorer,
        ranks: Ranks,
        dtype: torch.dtype,
        *,
        lora: LoraSettings | None = None,
    ) -> None:
        self.scorer = scorer
        self.ranks = ranks
        self.dtype = dtype
        self.lora = lora
        scorer.to(ranks.device)
        if ranks.size > 1:
            _shard(scorer, ranks, dtype)
        trained = [(name, p) for name, p in scorer.hf_names() if p.requires_grad]
        self.names = [name for name, _ in trained]
        self.params = [p for _, p in trained]
        if ranks.size == 1:
            for param in scorer.parameters():
                if not param.requires_grad:
                    param.data = param.data.to(dtype)
        self.long: LongWeights | None = None
        if ranks.size == 1 and dtype != torch.float32:
            self.long = LongWeights(self.params, dtype)
        if ranks.size == 1:
            join_weights(scorer, may_move=self.long is None)
        self.masters = self._make_masters()

    @staticmethod
    def frozen(scorer: PackedScorer, ranks: Ranks, dtype: torch.dtype) -> PackedScorer:
        """Place a model that is only scored: sharded and rounded as if it were trained."""
        scorer.to(ranks.device)
        if ranks.size > 1:
            _shard(scorer, ranks, dtype)
        else:
            for param in scorer.parameters():
                param.data = param.data.to(dtype)
            join_weights(scorer, may_move=True)
        return scorer

    def _make_masters(self) -> list[nn.Parameter]:
        if self.ranks.size > 1:
            return [nn.Parameter(_local(p.detach())) for p in self.params]
        return self.params if self.long is None else self.long.masters

    def expect(self, *, num_rows: int) -> None:
        """Say how many backward passes add up next."""
        if self.long is not None:
            self.long.expect(num_rows=num_rows)

    def collect_gradients(self) -> list[Tensor]:
        """This rank's part of each gradient that exists, as the masters' ``grad``."""
        if self.long is not None:
            return self.long.gradients()
        if self.ranks.size > 1:
            for param, master in zip(self.params, self.masters, strict=True):
                master.grad = None if param.grad is None else _local(param.grad)
        return [master.grad for master in self.masters if master.grad is not None]

    def place_gradients(self) -> None:
        """This rank's part of each gradient as its master's ``grad``, in fp32; None without one."""
        if self.long is None:
            self.collect_gradients()
            return
        for master, gradient in zip(self.masters, self.long.by_weight(), strict=True):
            master.grad = None if gradient is None else gradient.float()

    def tables(self) -> set[int]:
        """``id`` of the parameters that are looked up or scored by token: embedding and head."""
        model = self.scorer.causal_lm
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        return {id(end.weight) for end in ends if end is not None}

    def masters_changed(self) -> None:
        """Bring the forward pass up to date after the masters were written."""
        if self.long is not None:
            with torch.no_grad():
                self.long.round_masters()

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        for tensor in (*self.params, *self.masters):
            tensor.grad = None
        if self.long is not None:
            self.long.drop_gradient()

    def row_slices(self) -> list[tuple[tuple[int, ...], int]]:
        """Global shape, and first row of this rank's part, per weight."""
        return [_global_shape_and_start(param, self.ranks) for param in self.params]

    def specs(self) -> list[TensorSpec]:
        """What ``full_tensors`` yields: HF names, dtype of the forward pass, shapes."""
        return [self._spec(name, param) for name, param in self._of_model()]

    def adapter_specs(self) -> list[TensorSpec]:
        """What ``adapter_tensors`` yields."""
        return [self._spec(name, part) for name, part in adapter_parts(self.scorer.causal_lm)]

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole adapters by peft's names, one by one; collective."""
        for name, part in adapter_parts(self.scorer.causal_lm):
            yield name, whole(part.detach().to(self.dtype))

    def base_specs(self) -> list[TensorSpec]:
        """What ``base_tensors`` yields."""
        return [self._spec(name, p) for name, p in self._of_model() if not p.requires_grad]

    def base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights that do not train, adapters left out, one by one; collective."""
        for name, param in self._of_model():
            if not param.requires_grad:
                yield name, whole(param.detach().to(self.dtype))

    def _spec(self, name: str, param: Tensor) -> TensorSpec:
        dtype = str(self.dtype).removeprefix("torch.")
        return TensorSpec(name=name, dtype=dtype, shape=tuple(param.shape))

    def _of_model(self) -> list[tuple[str, nn.Parameter]]:
        """The model's own weights, adapters left out."""
        return [(name, p) for name, p in self.scorer.hf_names() if not is_adapter(name)]

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights one by one, rounded to the dtype of the forward pass; collective.

        Adapters are merged into them. At any time one weight exists whole beside the shards, and
        those the caller keeps.
        """
        layers = {} if self.lora is None else adapted(self.scorer.causal_lm)
        for name, param in self._of_model():
            value = whole(
                param.detach().to(self.dtype)
            )  # rounded before it travels: half the bytes
            layer = layers.get(name)
            if layer is not None and self.lora is not None:
                value = merged(value, layer, self.lora.scale, self.dtype)
            yield name, value

    @property
    def num_parameters(self) -> int:
        """Of the whole model, tied weights once; adapters are not counted."""
        return sum(param.numel() for _, param in self._of_model())


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without copying."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard(scorer: PackedScorer, ranks: Ranks, dtype: torch.dtype) -> None:
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for module in (*scorer.layers, scorer):
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
        # Loss weights are those of the whole optimizer batch: gradients add up, never averaged.
        sharded.set_gradient_divide_factor(1.0)
        # gloo knows no scaled sum.
        sharded.set_force_sum_reduction_for_comms(True)


def _global_shape_and_start(tensor: Tensor, ranks: Ranks) -> tuple[tuple[int, ...], int]:
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return shape, 0
    # Shard(0) as torch.chunk divides: equal chunks, the last ones shorter or empty.
    chunk = -(-shape[0] // ranks.size)
    return shape, min(chunk * ranks.rank, shape[0])
