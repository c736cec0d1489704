"""Supervised warm-up: right answers until sampling gets a first few right by itself.

Without it there is nothing to reinforce. Learned by trying (five seeds each): warming up to the
format only does not learn, a stop at 0.1 leaves seed-dependent plateaus, a learning rate of 1e-3 in
the reinforcement phase collapses.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from runtime.errors import ConfigError
from runtime.recipes.byte_tokenizer import EOS_ID, prompt_ids
from runtime.recipes.reverse_task import LENGTH, Question, draw
from runtime.recipes.tiny_model import sample


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """When to stop, and how fast to go."""

    until: float = 0.2
    """Sampled exact match at temperature 1."""
    batch: int = 64
    lr: float = 1e-3
    first_check: int = 40
    check_every: int = 5
    check_prompts: int = 256
    max_steps: int = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpResult:
    """Where it stopped."""

    steps: int
    sampled_exact_match: float


def warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: tuple[Question, ...],
    settings: WarmUp,
    *,
    seed: int,
) -> WarmUpResult:
    """Train ``model`` in place on right answers. Same seed and one thread: same weights.

    Raises:
        ConfigError: if ``settings.until`` is not reached within ``settings.max_steps``.
    """
    stream = draw(questions, f"warm-up {seed}")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(0.9, 0.99), weight_decay=0.0
    )
    model.train()
    accuracy = 0.0
    for step in range(1, settings.max_steps + 1):
        batch = list(islice(stream, settings.batch))
        _train_on(model, tokenizer, batch, optimizer)
        if step >= settings.first_check and step % settings.check_every == 0:
            asked = list(islice(stream, settings.check_prompts))
            accuracy = exact_match(model, tokenizer, asked, temperature=1.0, seed=seed + step)
            if accuracy >= settings.until:
                return WarmUpResult(steps=step, sampled_exact_match=accuracy)
    raise ConfigError(
        f"warm-up of the laptop model stopped at exact match {accuracy:.3f} after "
        f"{settings.max_steps} steps, wanted {settings.until}; try another seed",
        seed=seed,
    )


def _train_on(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    batch: list[Question],
    optimizer: torch.optim.Optimizer,
) -> None:
    prompts = [prompt_ids(tokenizer, q.prompt) for q in batch]
    answers = [[*tokenizer(q.answer)["input_ids"], EOS_ID] for q in batch]
    tokens = torch.tensor([p + a for p, a in zip(prompts, answers, strict=True)])
    start = len(prompts[0])
    logits = model(input_ids=tokens[:, :-1]).logits[:, start - 1 :]
    loss = cross_entropy(logits.flatten(0, 1), tokens[:, start:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def exact_match(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: list[Question],
    *,
    temperature: float,
    seed: int,
) -> float:
    """Share of ``questions`` answered exactly, one response each (0 = greedy)."""
    prompts = torch.tensor([prompt_ids(tokenizer, q.prompt) for q in questions])
    model.eval()
    responses = sample(
        model, prompts, max_new_tokens=LENGTH + 2, temperature=temperature, seed=seed
    )
    model.train()
    texts = tokenizer.batch_decode(responses.token_ids, skip_special_tokens=True)
    right = [text.strip() == q.answer for text, q in zip(texts, questions, strict=True)]
    return sum(right) / len(right)
