"""``TrainerBackend`` on HF model classes: one rank, alone or under FSDP2."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig

from runtime.engines.protocol import TensorSpec
from runtime.errors import ConfigError, ContractViolation, PartialWrite
from runtime.trainer.packing import Cost, by_flops, by_tokens
from runtime.trainer.protocol import Sequence, StagedState, TrainBatch, TrainMetrics
from runtime.trainer.settings import TrainerSettings
from runtime.trainer.torch import cute
from runtime.trainer.torch.compiled import compile_layers
from runtime.trainer.torch.exports import AdapterExport, BaseExport, in_buckets
from runtime.trainer.torch.layout import Kernel
from runtime.trainer.torch.lora import adapt
from runtime.trainer.torch.optimizer import Optimizer
from runtime.trainer.torch.packer import Packer, score
from runtime.trainer.torch.ranks import Ranks
from runtime.trainer.torch.record import MASTER, RNG_CPU, RNG_CUDA, RankRecord, RowSlice
from runtime.trainer.torch.scorer import PackedScorer, load_scorer
from runtime.trainer.torch.staging import Staging
from runtime.trainer.torch.state import StoredState, base_digest
from runtime.trainer.torch.update import Machinery, Update
from runtime.trainer.torch.weights import Weights


class TorchTrainer:
    """One rank. Construct, let the ranks join, ``load``; then as the protocol says."""

    def __init__(self, settings: TrainerSettings, ranks: Ranks | None = None) -> None:
        self.settings = settings
        self.ranks = ranks or Ranks()
        self.update = 0
        self.consumed_digest = ""
        self._skipped_steps = 0
        self._is_warm = False
        self._cute = cute.Taken(attention=False, products=False)
        self._staging = Staging()
        self._machinery: Machinery | None = None
        self._base_digest: str | None = None
        self._model_path = ""

    def load(self, model_path: str) -> dict[str, object]:
        """Load HF weights and make a fresh optimizer; facts about the model.

        Returns:
            vocab_size, num_parameters, tied, context_length, eos (list of ids), dtype, cute (list
            of what is taken from there).

        Raises:
            UnavailableFeature: if the model needs something this backend lacks.
            ConfigError: if ``settings.context`` does not divide the ranks, or a model's heads;
                ``settings.kernels`` asks for some that cannot be had; a model folder is not there.
        """
        settings = self.settings
        self.ranks.share_rows(settings.context)
        dtype = getattr(torch, settings.dtype)
        if settings.deterministic:  # before the first product, or torch would not see it
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        paths = [model_path, *self._frozen_paths(model_path)]
        for path in paths:
            if not Path(path).is_dir():  # or transformers would look for it elsewhere
                raise ConfigError(f"there is no model folder {path}", path=path)
        heads = map(_heads, paths)
        self._cute = cute.settle(settings.kernels, self.ranks.device, dtype, heads)
        torch.manual_seed(settings.seed + self.ranks.rank)
        lora = settings.lora
        scorer = self._load_scorer(model_path, trained=True)
        if lora is not None:
            adapt(scorer.causal_lm, lora, seed=settings.seed)
        weights = Weights(scorer, self.ranks, dtype, lora=lora)
        if settings.compile:
            compile_layers(scorer)
        self._machinery = Machinery(
            settings=settings,
            weights=weights,
            optimizer=Optimizer(weights, settings.optimizer),
            packer=Packer(
                self.ranks,
                capacity=settings.max_tokens_per_bin,
                share_prompts=settings.share_prompts,
                cost=_cost(settings, weights, scorer.causal_lm.config),
                kernel=self._row_kernel(dtype),
            ),
            reference=self._load_frozen(self._reference_path(model_path)),
            teacher=self._load_teacher(scorer.causal_lm.config.vocab_size),
            settle=self._staging.settle,
        )
        # One rank's word is enough, and hashing a large base takes a while.
        is_told = lora is not None and self.ranks.rank == 0
        self._base_digest = base_digest(Path(model_path)) if is_told else None
        self._model_path = model_path
        self.update, self.consumed_digest, self._skipped_steps = 0, "", 0
        taken = [name for name, is_taken in self._cute._asdict().items() if is_taken]
        return _facts(scorer, weights) | {"dtype": settings.dtype, "cute": taken}

    def _row_kernel(self, dtype: torch.dtype) -> Kernel | None:
        # Torch's is one for GPUs and for half precision as well.
        is_half = self.ranks.device.type == "cuda" and dtype == torch.bfloat16
        return "cute" if self._cute.attention else "torch" if is_half else None

    def _load_scorer(self, path: str, *, trained: bool = False) -> PackedScorer:
        # A layer with an adapter computes its own product.
        has_adapters = trained and self.settings.lora is not None
        joint = self.settings.joint_projections
        return load_scorer(
            path,
            temperature=self.settings.temperature,
            chunk=self.settings.head_chunk_tokens,
            activation_checkpointing=self.settings.activation_checkpointing,
            joint_projections=not has_adapters
            and (self.ranks.device.type == "cuda" if joint is None else joint),
            takes_cute=self._cute.products,
            context=self.settings.context,
        )

    def _frozen_paths(self, model_path: str) -> list[str]:
        return [p for p in (self._reference_path(model_path), self._teacher_path()) if p]

    def _reference_path(self, model_path: str) -> str | None:
        """None unless KL is used, and where the base under adapters serves as it."""
        settings = self.settings
        lora = settings.lora
        is_base = lora is not None and not lora.also and settings.reference is None
        if not settings.loss.uses_reference or is_base:
            return None
        return settings.reference or model_path

    def _teacher_path(self) -> str | None:
        """None without distillation."""
        return self.settings.teacher if self.settings.loss.teacher_coef else None

    def _load_teacher(self, vocab_size: int) -> PackedScorer | None:
        """The teacher; None without distillation.

        Raises:
            ConfigError: if it has another vocabulary than the student.
        """
        path = self._teacher_path()
        scorer = self._load_frozen(path)
        if scorer is None:
            return None
        found = scorer.causal_lm.config.vocab_size
        if found != vocab_size:
            raise ConfigError(
                f"teacher.path = {path}: a vocabulary of {found}, the student has {vocab_size}",
                teacher=found,
                student=vocab_size,
            )
        return scorer

    def _load_frozen(self, path: str | None) -> PackedScorer | None:
        """A model that is only scored, sharded and rounded like the policy; None: there is none."""
        if path is None:
            return None
        scorer = self._load_scorer(path)
        scorer.requires_grad_(False)
        Weights.frozen(scorer, self.ranks, getattr(torch, self.settings.dtype))
        if self.settings.compile:
            compile_layers(scorer)
        return scorer

    @property
    def _ready(self) -> Machinery:
        if self._machinery is None:
            raise RuntimeError("the trainer has no model yet: call load first")
        return self._machinery

    def score(
        self, sequences: tuple[Sequence, ...], *, temperature: float
    ) -> list[NDArray[np.float32]]:
        """Log-probs of each response under the current weights, same order, on every rank.

        Raises:
            ValueError: if ``temperature`` is not the one this trainer was made for.
        """
        if temperature != self.settings.temperature:
            raise ValueError(
                f"the trainer scores at {self.settings.temperature}, not {temperature}"
            )
        lengths = [len(s.tokens) - s.prompt_len for s in sequences]
        offset_S = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        m = self._ready
        flat = score(m.weights.scorer, m.packer, sequences, offset_S).numpy()
        return np.split(flat, offset_S[1:-1])

    def train_step(self, batch: TrainBatch) -> TrainMetrics:
        """Make the updates up to ``batch.update`` from one collection.

        Raises:
            ContractViolation: if ``batch.update`` is not the next one, or as ``Update.run`` says.
        """
        if batch.update != self.update + self.settings.updates_per_collection:
            raise ContractViolation(
                f"the trainer stands at update {self.update}; a batch for {batch.update} came",
                update=self.update,
                batch=batch.update,
            )
        update = Update(self._ready, batch, skipped_before=self._skipped_steps)
        values = update.run()
        if self.settings.compile and not self._is_warm:
            # Compiling leaves millions of objects that live as long as the process; looking through
            # them again stopped the host for 40 ms every few updates.
            gc.collect()
            gc.freeze()
            self._is_warm = True
        self.update, self.consumed_digest = batch.update, batch.consumed_digest
        self._skipped_steps = update.skipped_total
        return TrainMetrics(values=values)

    def weight_specs(self) -> list[TensorSpec]:
        """HF names, dtypes and shapes in export order; tied weights once."""
        return self._ready.weights.specs()

    @property
    def adapter(self) -> AdapterExport:
        """The adapters alone, as another set of weights to export.

        Raises:
            ConfigError: if the trainer has none.
        """
        lora = self.settings.lora
        if lora is None:
            raise ConfigError("an adapter was asked for, but lora.rank is 0")
        return AdapterExport(weights=self._ready.weights, settings=lora, base=self._model_path)

    @property
    def base(self) -> BaseExport:
        """What lies under the adapters, as another set of weights to export."""
        return BaseExport(weights=self._ready.weights)

    def export_weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Whole weights in buckets of at most ``bucket_bytes``; a larger tensor comes alone.

        Collective: every rank must exhaust it. Alone and in fp32 the tensors *are* the weights, not
        copies: use them before the next step.
        """
        return in_buckets(self._ready.weights.full_tensors(), bucket_bytes)

    def stage(self) -> StagedState:
        """Begin to copy model, optimizer, RNG, counters and digest to host memory.

        The next optimizer step waits for what is still to be copied then.
        """
        m = self._ready
        tensors: dict[str, Tensor] = {}
        slices: dict[str, RowSlice] = {}
        for name, part, (shape, start) in self._stored_parts():
            slices[name] = RowSlice(shape=shape, start=start)
            if part.numel() or not part.dim():
                tensors[name] = part
        tensors[RNG_CPU] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors[RNG_CUDA] = torch.cuda.get_rng_state()
        record = RankRecord(
            rank=self.ranks.rank,
            world_size=self.ranks.size,
            update=self.update,
            consumed_digest=self.consumed_digest,
            optimizer_steps=m.optimizer.num_steps,
            skipped_steps=self._skipped_steps,
            slices={name: s for name, s in slices.items() if name in tensors},
            base_digest=self._base_digest,
        )
        return self._staging.stage(tensors, record)

    def _stored_parts(self) -> Iterator[tuple[str, Tensor, tuple[tuple[int, ...], int]]]:
        """(stored name, this rank's part, (whole shape, first row)); writing to a part sets it."""
        m = self._ready
        rows = zip(
            m.weights.names,
            (master.detach() for master in m.weights.masters),
            m.optimizer.state(),
            m.weights.row_slices(),
            strict=True,
        )
        for name, master, kept, place in rows:
            for kind, part in {MASTER: master, **kept}.items():
                yield f"{kind}/{name}", part, place

    def write_staged(self, token: str, folder: str) -> dict[str, str]:
        """Write a staged copy as this rank's files, fsynced; SHA-256 by name. Frees the copy."""
        return self._staging.write(token, Path(folder))

    def restore(self, folder: str) -> dict[str, object]:
        """Load a committed state made by any number of ranks; ``update`` and ``consumed_digest``.

        ``load`` comes first, with the model the run began with. A rank that did not exist when the
        state was written starts its RNG from (seed, rank, update).

        Raises:
            PartialWrite: if files are missing, damaged, or of another model.
        """
        m = self._ready
        self._staging.settle()
        stored = StoredState(Path(folder))
        record = stored.records[0]
        if self.ranks.rank == 0 and record.base_digest != self._base_digest:
            raise PartialWrite(
                f"{folder} holds adapters of the base {record.base_digest}, loaded is "
                f"{self._base_digest} (None: all weights train)"
            )
        with stored, torch.no_grad():
            for name, part, (shape, start) in self._stored_parts():
                stored.fill(name, part, shape=shape, start=start)
            rng = stored.rng(self.ranks.rank)
        m.weights.masters_changed()
        m.optimizer.num_steps = record.optimizer_steps
        if rng is None:
            torch.manual_seed(self.settings.seed + self.ranks.rank + 1_000_003 * record.update)
        else:
            _set_rng(rng, folder)
        self.update, self.consumed_digest = record.update, record.consumed_digest
        self._skipped_steps = record.skipped_steps
        return {"update": record.update, "consumed_digest": record.consumed_digest}

    def stop(self) -> None:
        """Leave the process group and free memory. Idempotent."""
        self._staging.settle()
        self._machinery = None
        self.ranks.leave()


def _set_rng(rng: dict[str, Tensor], folder: str) -> None:
    if RNG_CPU not in rng:
        raise PartialWrite(f"{folder}: the RNG state is missing")
    torch.set_rng_state(rng[RNG_CPU])
    if torch.cuda.is_available() and RNG_CUDA in rng:
        torch.cuda.set_rng_state(rng[RNG_CUDA])


def _heads(path: str) -> cute.Heads:
    config = AutoConfig.from_pretrained(path)
    queries = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or queries
    return cute.Heads(per_group=queries // groups, size=_head_size(config))


def _head_size(config: Any) -> int:
    size: int | None = getattr(config, "head_dim", None)
    return size or config.hidden_size // config.num_attention_heads


def _cost(settings: TrainerSettings, weights: Weights, config: Any) -> Cost:
    if settings.packing == "tokens":
        return by_tokens
    pair = 4 * config.num_attention_heads * _head_size(config) * config.num_hidden_layers
    return by_flops(2.0 * weights.num_parameters, float(pair))


def _facts(scorer: PackedScorer, weights: Weights) -> dict[str, object]:
    model = scorer.causal_lm
    config = model.config
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = config.eos_token_id
    return {
        "vocab_size": config.vocab_size,
        "num_parameters": weights.num_parameters,
        "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        "context_length": config.max_position_embeddings,
        "eos": [] if eos is None else list(eos) if isinstance(eos, list) else [eos],
    }
