"""The laptop recipe: a 300k-parameter model that learns to reverse four letters, made from nothing.

What ``make`` leaves behind::

    <folder>/model/          config, weights, tokenizer with chat template   (loads in transformers)
    <folder>/train.jsonl     {"prompt": "hdbe", "answer": "ebdh"} per line   (exact match)
    <folder>/holdout.jsonl   the same shape, strings that training never sees
    <folder>/recipe.json     what it was made with, and where the warm-up stopped
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from transformers.utils import logging

from runtime.errors import ManifestConflict, PartialWrite
from runtime.recipes.byte_tokenizer import byte_tokenizer
from runtime.recipes.reverse_task import Question, draw, split_questions
from runtime.recipes.tiny_model import SHAPES, new_model
from runtime.recipes.warm_up import WarmUp, WarmUpResult, warm_up


class RecipeRecord(BaseModel):
    """``recipe.json``: written last, so a folder that has it is whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    seed: int
    shape: str
    prompts: int
    holdout: int
    warm_up: bool
    warm_up_steps: int
    sampled_exact_match: float | None
    """At temperature 1 when the warm-up stopped; None without a warm-up."""

    def is_same_order(self, other: RecipeRecord) -> bool:
        """Both were ordered alike; results may differ."""
        results = {"warm_up_steps", "sampled_exact_match"}
        return self.model_dump(exclude=results) == other.model_dump(exclude=results)


@dataclass(frozen=True, slots=True, kw_only=True)
class Laptop:
    """Where everything lies."""

    model: Path
    train: Path
    holdout: Path
    record: RecipeRecord


def make(
    folder: Path,
    *,
    seed: int,
    prompts: int = 8192,
    holdout: int = 256,
    shape: str = "300k",
    warm_up_until: float | None = WarmUp().until,
) -> Laptop:
    """Make model, tokenizer and data in ``folder``; the same seed gives the same files.

    Idempotent: a folder made with the same order is returned as it is. All is written beside,
    fsynced and renamed, so ``folder`` exists whole or not at all. Runs on one torch thread, since
    the order of additions, and so the weights, would change with the number of threads.

    Args:
        folder: the target; its parent is created.
        seed: of weights, data and warm-up.
        prompts: lines of ``train.jsonl``; beyond 3840 strings come again, in another order.
        holdout: lines of ``holdout.jsonl``.
        shape: a name in ``tiny_model.SHAPES``.
        warm_up_until: sampled exact match to warm up to; None leaves random weights (quick, for
            tests that need a model and not its answers).

    Raises:
        ManifestConflict: if ``folder`` holds something made with another order, or by someone else.
        ConfigError: if the warm-up does not get there.
    """
    ordered = RecipeRecord(
        seed=seed,
        shape=shape,
        prompts=prompts,
        holdout=holdout,
        warm_up=warm_up_until is not None,
        warm_up_steps=0,
        sampled_exact_match=None,
    )
    if folder.exists():
        return _found(folder, ordered)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        _write_all(scratch, ordered, warm_up_until)
        scratch.rename(folder)
    except FileExistsError:
        return _found(folder, ordered)  # someone else was faster
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _fsync(folder.parent)
    return _found(folder, ordered)


def _write_all(scratch: Path, ordered: RecipeRecord, until: float | None) -> None:
    split = split_questions(ordered.seed, ordered.holdout)
    tokenizer = byte_tokenizer()
    model = new_model(SHAPES[ordered.shape], seed=ordered.seed)
    result = WarmUpResult(steps=0, sampled_exact_match=0.0)
    if until is not None:
        with _one_thread():
            settings = WarmUp(until=until)
            result = warm_up(model, tokenizer, split.training, settings, seed=ordered.seed)
    with _no_progress_bar():
        model.save_pretrained(scratch / "model")
    tokenizer.save_pretrained(scratch / "model")
    stream = draw(split.training, f"train {ordered.seed}")
    _write_jsonl(scratch / "train.jsonl", islice(stream, ordered.prompts))
    _write_jsonl(scratch / "holdout.jsonl", split.holdout)
    record = ordered.model_copy(
        update={
            "warm_up_steps": result.steps,
            "sampled_exact_match": None if until is None else result.sampled_exact_match,
        }
    )
    (scratch / "recipe.json").write_text(record.model_dump_json(indent=2) + "\n")
    for path in sorted(scratch.rglob("*")):
        _fsync(path)
    _fsync(scratch)


def _found(folder: Path, ordered: RecipeRecord) -> Laptop:
    path = folder / "recipe.json"
    try:
        record = RecipeRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError as exc:
        raise ManifestConflict(
            f"{folder} exists and was not made by this recipe (no recipe.json)"
        ) from exc
    except ValidationError as exc:
        raise PartialWrite(f"{path} is not a recipe record: {exc}") from exc
    if not record.is_same_order(ordered):
        raise ManifestConflict(
            f"{folder} was made with {record.model_dump()}, asked for {ordered.model_dump()}"
        )
    return Laptop(
        model=folder / "model",
        train=folder / "train.jsonl",
        holdout=folder / "holdout.jsonl",
        record=record,
    )


def _write_jsonl(path: Path, questions: Iterable[Question]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(q)) + "\n" for q in questions)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _no_progress_bar() -> Generator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _one_thread() -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
