"""Where model, prompts and rewards come from: exactly one source each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from configs.problems import nearest_name
from configs.rules.finding import Finding, refused, warned
from configs.run import RunSpec
from configs.section import IMPORT_PATH
from configs.shape import ModelShape

Rule = Callable[[RunSpec, ModelShape | None], Iterator[Finding]]

VERIFIERS = (
    "exact_match",
    "math",
    "multiple_choice",
    "instructions",
    "code",
    "judge",
    "http",
)


def _one_source(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    sources = [
        ("model", ("path", "recipe"), (spec.model.path, spec.model.recipe)),
        ("data", ("train", "recipe"), (spec.data.train, spec.data.recipe)),
    ]
    for name, each in spec.evaluation.sets.items():
        sources.append(
            (f"evaluation.sets.{name}", ("prompts", "recipe"), (each.prompts, each.recipe))
        )
    for table, keys, values in sources:
        given = sum(value is not None for value in values)
        if given != 1:
            word = "both" if given else "neither"
            yield refused(
                *(f"{table}.{key}" for key in keys),
                because=f"{word} of {keys[0]} and {keys[1]} set",
                allowed=f'exactly one: {keys[0]} = "..." or {keys[1]} = "laptop"',
            )


def _recipe_model(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    for key in ("tokenizer", "chat_template"):
        if spec.model.recipe is not None and getattr(spec.model, key) is not None:
            yield refused(
                f"model.{key}",
                "model.recipe",
                because=f"the {spec.model.recipe} recipe makes its own {key}",
                allowed=f"leave {key} out, or give model.path",
            )


def _verifier(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    reward = spec.reward
    if reward.verifier is None and spec.algorithm == "grpo":
        yield refused(
            "reward.verifier",
            "algorithm",
            because="nothing says how responses are judged; only OPD runs without rewards",
            allowed=", ".join(VERIFIERS) + ', or "package.module:name"',
        )
    named = [("reward.verifier", reward.verifier)]
    named += [
        (f"evaluation.sets.{k}.verifier", s.verifier) for k, s in spec.evaluation.sets.items()
    ]
    for field, verifier in named:
        if verifier is None:
            continue
        if verifier not in VERIFIERS and IMPORT_PATH.fullmatch(verifier) is None:
            yield Finding(
                fields=(field,),
                message="no such verifier",
                allowed=", ".join(VERIFIERS) + ', or "package.module:name"',
                nearest=nearest_name(verifier, VERIFIERS),
            )
        service = {"http": reward.url, "code": reward.code, "judge": reward.judge}
        if verifier in service and service[verifier] is None:
            need = "reward.url" if verifier == "http" else f"[reward.{verifier}]"
            yield refused(field, because=f"the {verifier} verifier needs {need}", allowed=need)


def _judge(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    judge = spec.reward.judge
    if judge is None:
        return
    if judge.managed == (judge.url is not None):
        yield refused(
            "reward.judge.url",
            "reward.judge.managed",
            because="a judge has an address or is managed, one of the two",
            allowed='url = "..." or managed = true',
        )
    if judge.managed and judge.model is None:
        yield refused(
            "reward.judge.model", "reward.judge.managed", because="a managed judge needs a model"
        )


def _evaluation(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    evaluation = spec.evaluation
    if evaluation.every_updates is not None and not evaluation.sets:
        yield refused(
            "evaluation.every_updates",
            because="no sets to evaluate",
            allowed="a table [evaluation.sets.NAME]",
        )
    for name, each in evaluation.sets.items():
        table = f"evaluation.sets.{name}"
        if each.pass_at > each.samples:
            yield refused(
                f"{table}.pass_at",
                f"{table}.samples",
                because=f"pass@{each.pass_at} needs as many samples, there are {each.samples}",
            )
        if each.samples > 1 and each.temperature == 0:
            yield warned(
                f"{table}.samples",
                because=f"{table}: {each.samples} samples at temperature 0 are one sample repeated",
            )
        if each.verifier is None and spec.reward.verifier is None:
            yield refused(
                f"{table}.verifier", "reward.verifier", because="no verifier for this set"
            )


INPUT_RULES: tuple[Rule, ...] = (
    _one_source,
    _recipe_model,
    _verifier,
    _judge,
    _evaluation,
)
