"""The first step of a run: what the model is, the frozen data, which verifiers.

Runs as a process of its own (``python -m runtime.session.preparing ATTEMPT_DIR``), so that the
session neither imports torch nor waits idle while Ray starts. Idempotent: a finished preparation is
checked, not made again.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import anyio
import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from configs.evaluation import EvaluationSet
from configs.run import RunSpec
from runtime.errors import ConfigError, PartialWrite, RunError, SessionLost, WaitTimeout
from runtime.rundir.atomic import write_json
from runtime.rundir.layout import AttemptDir, RunRoot
from runtime.session import deadman

if TYPE_CHECKING:
    from runtime.data.frozen import FrozenFacts
    from runtime.data.tokenizer import PromptTokenizer
    from runtime.recipes.laptop import Laptop

_log: structlog.stdlib.BoundLogger = structlog.get_logger("session")
_DEADLINE_S = 1800.0
_ERROR_EXIT = 3
_FOLDER_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
"""What decides shapes and token ids in a folder of the author's."""


class PreparedSet(BaseModel):
    """One evaluation set, frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: str
    fingerprint: str
    num_prompts: int


class Prepared(BaseModel):
    """``prepared/receipt.json``: written last; all that later steps need to know."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    model: str
    """HF folder the trainer and the engines load."""
    tokenizer: str
    """Folder of the tokenizer."""
    data: str
    """The frozen prompts."""
    fingerprint: str
    num_prompts: int
    longest_prompt_tokens: int
    sets: dict[str, PreparedSet]
    asked: str = ""
    """Digest of what the run file says about it."""
    sources: dict[str, tuple[int, int]] = {}
    """Size and modification time (ns) of every file outside the output root that went in."""

    @classmethod
    def read(cls, root: RunRoot) -> Prepared | None:
        """The receipt, or None before there is one.

        Raises:
            PartialWrite: if it cannot be read as one.
        """
        path = receipt_path(root)
        if not path.exists():
            return None
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise PartialWrite(f"{path} is no preparation receipt: {error}") from error


def receipt_path(root: RunRoot) -> Path:
    """Where the receipt lies."""
    return root.prepared / "receipt.json"


async def prepare(attempt: AttemptDir) -> Prepared:
    """Run the preparation in its own process and read its receipt.

    Where a receipt stands and nothing that went in has been touched since, that is the answer.

    Raises:
        ConfigError: if model or data cannot be used, with the process's own message.
        WaitTimeout: if it takes longer than half an hour.
        SessionLost: if the process died without a word.
    """
    spec = RunSpec.model_validate_json(attempt.run.read_bytes())
    standing = _standing(attempt.root, spec)
    if standing is not None:
        return standing
    command = [sys.executable, "-m", "runtime.session.preparing", str(attempt.path)]
    try:
        with anyio.fail_after(_DEADLINE_S):
            done = await anyio.run_process(command, check=False)
    except TimeoutError as error:
        raise WaitTimeout(
            f"preparation of model and data took longer than {_DEADLINE_S:g} s"
        ) from error
    if done.returncode == _ERROR_EXIT:
        said = json.loads(done.stderr.decode().strip().splitlines()[-1])
        raise ConfigError(said["message"], error_class=said["class"])
    if done.returncode != 0:
        tail = done.stderr.decode(errors="replace")[-2000:]
        raise SessionLost(f"preparation exited with {done.returncode}: {tail}")
    receipt = Prepared.read(attempt.root)
    if receipt is None:
        raise PartialWrite("preparation ended well but left no receipt")
    return receipt


def run_preparation(spec: RunSpec, root: RunRoot) -> Prepared:
    """Make or find everything, then write the receipt.

    Raises:
        ConfigError: if model, tokenizer, template or a data file cannot be used, or changed since a
            previous attempt.
    """
    from runtime.data.prompts import load_tokenizer

    root.prepared.mkdir(parents=True, exist_ok=True)
    made = _recipe(spec, root)
    model = spec.model.path or (made.model if made else None)
    train = spec.data.train or (made.train if made else None)
    if model is None or train is None:
        raise ConfigError("model.path or model.recipe, and data.train or data.recipe, must be set")
    if not (Path(model) / "config.json").is_file():
        raise ConfigError(f"model.path = {str(model)!r}: no config.json there")
    tokenizer_folder = Path(spec.model.tokenizer or model)
    template = spec.model.chat_template
    tokenizer = load_tokenizer(
        tokenizer_folder, chat_template=None if template is None else Path(template)
    )
    main = _freeze(spec, Path(train), root.prepared / "data.parquet", tokenizer, None)
    sets: dict[str, PreparedSet] = {}
    for name, section in spec.evaluation.sets.items():
        source = section.prompts or (made.holdout if made else None)
        if source is None:
            raise ConfigError(f"evaluation.sets.{name}: set prompts or recipe")
        target = root.prepared / f"evaluation-{name}.parquet"
        facts = _freeze(spec, Path(source), target, tokenizer, section)
        sets[name] = PreparedSet(
            data=str(target),
            fingerprint=facts.fingerprint,
            num_prompts=min(facts.num_prompts, section.num_prompts or facts.num_prompts),
        )
    receipt = Prepared(
        model=str(model),
        tokenizer=str(tokenizer_folder),
        data=str(root.prepared / "data.parquet"),
        fingerprint=main.fingerprint,
        num_prompts=main.num_prompts,
        longest_prompt_tokens=main.longest_prompt_tokens,
        sets=sets,
        asked=_asked(spec),
        sources={str(path): _stamp(path) for path in _sources(spec)},
    )
    write_json(receipt_path(root), receipt.model_dump(mode="json"), durable=True)
    return receipt


def _asked(spec: RunSpec) -> str:
    """Digest of the fields that decide what is prepared."""
    said = spec.model_dump(mode="json", include={"seed", "model", "data", "evaluation", "reward"})
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _sources(spec: RunSpec) -> list[Path]:
    """Files of the author's that go in; a folder counts by what identifies its content."""
    named = [spec.model.chat_template, spec.data.train]
    named += [section.prompts for section in spec.evaluation.sets.values()]
    folders = [spec.model.path, spec.model.tokenizer or spec.model.path]
    inside = [
        Path(folder) / name for folder in folders if folder is not None for name in _FOLDER_FILES
    ]
    return [Path(path) for path in named if path is not None] + inside


def _stamp(path: Path) -> tuple[int, int]:
    """Size and modification time; (-1, -1) for what is not there."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return -1, -1
    return stat.st_size, stat.st_mtime_ns


def _standing(root: RunRoot, spec: RunSpec) -> Prepared | None:
    """The receipt, if it answers this run file, its sources are as they were, its copies here.

    A receipt that cannot be read is none: the preparation writes it anew.
    """
    try:
        receipt = Prepared.read(root)
    except PartialWrite:
        return None
    if receipt is None or receipt.asked != _asked(spec):
        return None
    if receipt.sources != {str(path): _stamp(path) for path in _sources(spec)}:
        return None
    made = [receipt.data, *(found.data for found in receipt.sets.values())]
    if spec.model.recipe is not None:
        made.append(f"{receipt.model}/config.json")
    # A copied run folder names the files of the one it was copied from.
    is_here = all(Path(path).is_relative_to(root.prepared) for path in made)
    return receipt if is_here and all(Path(path).is_file() for path in made) else None


def _recipe(spec: RunSpec, root: RunRoot) -> Laptop | None:
    wanted = {spec.model.recipe, spec.data.recipe}
    wanted |= {s.recipe for s in spec.evaluation.sets.values()}
    if wanted == {None}:
        return None
    from runtime.recipes import laptop

    return laptop.make(root.prepared / "laptop", seed=spec.seed)


def _freeze(
    spec: RunSpec,
    source: Path,
    target: Path,
    tokenizer: PromptTokenizer,
    section: EvaluationSet | None,
) -> FrozenFacts:
    from runtime.data.prompts import FieldNames, freeze

    if not source.exists() and not target.exists():
        raise ConfigError(f"no such data file: {source}", path=str(source))
    verifier = section.verifier if section is not None and section.verifier else None
    return freeze(
        source,
        target,
        tokenizer=tokenizer,
        fields=FieldNames(
            prompt=spec.data.prompt_field,
            answer=spec.data.answer_field,
            verifier=spec.data.verifier_field,
        ),
        max_prompt_tokens=spec.data.max_prompt_tokens,
        default_verifier=verifier or spec.reward.verifier,
        apply_chat_template=spec.data.apply_chat_template,
    )


def main() -> int:
    """Prepare the run of the attempt folder given as the only argument."""
    attempt = AttemptDir(Path(sys.argv[1]))
    deadman.watch(attempt.path)
    spec = RunSpec.model_validate_json(attempt.run.read_bytes())
    try:
        run_preparation(spec, attempt.root)
    except RunError as error:
        said = {"class": type(error).__name__, "message": error.message}
        sys.stderr.write("\n" + json.dumps(said) + "\n")
        return _ERROR_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main())
