"""The model as the trainer uses it: packed row in, log-probs of its response tokens out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from runtime.errors import UnavailableFeature
from runtime.trainer.torch.attention import NAME
from runtime.trainer.torch.context import put_together, require_divisible
from runtime.trainer.torch.head import chunked_logprobs, likeliest
from runtime.trainer.torch.layout import PackedRow
from runtime.trainer.torch.projections import fuse_projections


class PackedScorer(nn.Module):
    """A causal model and its output layer behind one ``forward``.

    One module, because FSDP gathers parameters when the module that owns them runs: the output
    layer and the embedding (often the same tensor) belong to this one.
    """

    def __init__(
        self, causal_lm: Any, *, temperature: float, chunk: int, takes_cute: bool = False
    ) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._temperature = temperature
        self._chunk = chunk
        self._takes_cute = takes_cute

    def forward(
        self,
        row: PackedRow,
        *,
        with_entropy: bool = False,
        also_RK: Tensor | None = None,
        num_likeliest: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Score a packed row.

        Args:
            row: tokens and who attends to whom.
            with_entropy: otherwise entropies are 0.
            also_RK: int64 [R, K] further tokens to score at each place.
            num_likeliest: above 0: score that many likeliest tokens instead, without a gradient.

        Returns:
            float32 log-probs [R] and entropies [R] of the row's response tokens, in its order, and
            log-probs [R, K] of the further tokens. With ``num_likeliest``: log-probs [R, K], ids
            [R, K], and nothing.
        """
        hidden_1TD = self.causal_lm.base_model(
            input_ids=row.token_T[None],
            position_ids=row.position_T[None],
            use_cache=False,
            packed=row,
        ).last_hidden_state
        hidden_RD = hidden_1TD.squeeze(0).index_select(0, row.source_R)
        target_R, part = row.target_R, row.part
        if part is not None:  # the output layer sees this rank's places alone
            target_R = target_R.index_select(0, part.place_N)
            also_RK = None if also_RK is None else also_RK.index_select(0, part.place_N)
        weight_VD = self.causal_lm.get_output_embeddings().weight
        if num_likeliest:
            logprob_RK, id_RK = likeliest(
                hidden_RD,
                weight_VD,
                num_likeliest,
                temperature=self._temperature,
                chunk=self._chunk,
            )
            if part is not None:
                rows = row.target_R.shape[0]
                logprob_RK = put_together(part, logprob_RK, rows)
                id_RK = put_together(part, id_RK, rows)
            return logprob_RK, id_RK, hidden_RD.new_empty(0)
        logprob_R, entropy_R, logprob_RK = chunked_logprobs(
            hidden_RD,
            weight_VD,
            target_R,
            temperature=self._temperature,
            chunk=self._chunk,
            with_entropy=with_entropy,
            also_RK=also_RK,
            takes_cute=self._takes_cute,
        )
        if part is None:
            return logprob_R, entropy_R, logprob_RK
        mine = torch.cat([logprob_R[:, None], entropy_R[:, None], logprob_RK], 1)
        whole = put_together(part, mine, row.target_R.shape[0])  # one exchange for all of them
        # Copies, which FSDP asks for: its hooks do not survive what is done to a view in place.
        return whole[:, 0].clone(), whole[:, 1].clone(), whole[:, 2:].clone()

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, in order: units of sharding, compilation and recomputation."""
        found = next(
            (m for m in self.causal_lm.base_model.children() if isinstance(m, nn.ModuleList)), None
        )
        return [] if found is None else list(found)

    def hf_names(self) -> list[tuple[str, nn.Parameter]]:
        """HF name and parameter, in the model's order; tied weights once, under the first name."""
        prefix = "causal_lm."
        return [(name.removeprefix(prefix), p) for name, p in self.named_parameters()]


def load_scorer(
    model_path: str,
    *,
    temperature: float,
    chunk: int,
    activation_checkpointing: bool,
    joint_projections: bool = False,
    takes_cute: bool = False,
    context: int = 1,
) -> PackedScorer:
    """Load an HF folder in fp32.

    Args:
        model_path: the folder.
        temperature: log-probs are of the distribution at it.
        chunk: rows of logits that exist at one time.
        activation_checkpointing: recompute each layer in the backward pass.
        joint_projections: q, k, v as one product, gate and up as another; pays on a GPU.
        takes_cute: products by kernels of ``cute``; attention goes by the row.
        context: ranks that share a row.

    Raises:
        ConfigError: if ``context`` does not divide the model's heads.
        UnavailableFeature: if the model is of a kind whose packed forward would be wrong here:
            sliding windows, capped logits, a biased output layer, or an architecture that does not
            route attention through transformers' interface.
    """
    config = AutoConfig.from_pretrained(model_path)
    _require_supported(config)
    require_divisible(config, context, model_path)
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_path, config=config, dtype=torch.float32, attn_implementation=NAME
        )
    finally:
        if bar:
            logging.enable_progress_bar()
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise UnavailableFeature("not available yet: an output layer with a bias")
    scorer = PackedScorer(
        model.train(), temperature=temperature, chunk=chunk, takes_cute=takes_cute
    )
    if activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if joint_projections:
        fuse_projections(model, takes_cute=takes_cute)
    return scorer


def _require_supported(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    capped = [
        name
        for name in ("final_logit_softcapping", "attn_logit_softcapping")
        if getattr(config, name, None)
    ]
    if kinds != {"full_attention"} or capped:
        raise UnavailableFeature(
            f"not available yet in the torch trainer: layers {sorted(kinds)}, {capped}"
        )
