"""Verifiers by name. They run inside worker processes only (see ``workers``).

A verifier is a plain function. Single: ``f(response, answer, metadata, **arguments) -> number``;
batched: ``f(responses, answer, metadata, **arguments) -> list of numbers``, one call a group. What
it cannot judge it raises on; it never gives 0 for a failure of its own.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.errors import ConfigError, UnavailableFeature

Answer = str | None
Metadata = Mapping[str, object]
Single = Callable[..., object]

_BUILT_IN = {
    "exact_match": "runtime.rewards.exact:exact_match",
    "math": "runtime.rewards.mathematics:math_answer",
    "multiple_choice": "runtime.rewards.choices:multiple_choice",
    "instructions": "runtime.rewards.instructions:instructions",
}
_INSTANT = {"exact_match", "multiple_choice"}
"""Linear in the length of a response, whatever it says."""
_NOT_YET = {"code", "judge", "http"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierSpec:
    """Which verifier, called how."""

    name: str
    """A built-in name, or ``module:function`` (``import:module:function`` says the same)."""
    arguments: Mapping[str, object] = field(default_factory=dict[str, object])
    """Keyword arguments of every call; JSON values."""
    batched: bool = False
    """The function takes all responses of a group at once; also so if it has ``batched = True``."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """A loaded verifier."""

    function: Single
    arguments: Mapping[str, object]
    batched: bool
    is_instant: bool = False
    """It compares texts in linear time and cannot end its process: the verdicts of a group may
    travel together, which costs the session a wake-up instead of one for each."""

    def judge(
        self, responses: Sequence[str], answer: Answer, metadata: Metadata
    ) -> Iterable[object]:
        """Verdicts in order, unchecked. Lazy when single, so that each has a time limit of its own.

        Raises:
            Exception: whatever the function raises.
        """
        if self.batched:
            return self._batch(responses, answer, metadata)
        return (self.function(text, answer, metadata, **self.arguments) for text in responses)

    def _batch(
        self, responses: Sequence[str], answer: Answer, metadata: Metadata
    ) -> Iterable[object]:
        verdicts: Any = self.function(list(responses), answer, metadata, **self.arguments)
        verdicts = list(verdicts)
        if len(verdicts) != len(responses):
            # Every verdict is worthless when they cannot be told apart; the caller refuses a text.
            return [f"{len(verdicts)} verdicts for {len(responses)} responses"] * len(responses)
        return verdicts


def verifier_specs(
    names: Iterable[str],
    *,
    default: str | None,
    arguments: Mapping[str, object],
    batched: bool = False,
) -> tuple[VerifierSpec, ...]:
    """One spec for each name that occurs in the data; arguments belong to the default verifier.

    Raises:
        ConfigError: if a name is unknown, or a built-in verifier is said to be batched.
        UnavailableFeature: if a verifier is not in this version.
    """
    wanted = sorted({*names} | ({default} if default else set()))
    for name in wanted:
        check_name(name)
    if batched and default in _BUILT_IN:
        raise ConfigError(f"reward.batched is for verifiers by import path, not {default!r}")
    return tuple(
        VerifierSpec(name=name, arguments=dict(arguments), batched=batched)
        if name == default
        else VerifierSpec(name=name)
        for name in wanted
    )


def check_name(name: str) -> None:
    """Refuse a name that cannot be loaded; imports nothing.

    Raises:
        ConfigError: if the name is neither built in nor an import path.
        UnavailableFeature: if it is one of a later version.
    """
    _target(name)


def load_verifier(spec: VerifierSpec) -> Verifier:
    """Import a verifier; called inside a worker.

    Raises:
        ConfigError: if the name is unknown, the module has no such function, or the function does
            not take the arguments.
        Exception: whatever importing the module raises.
    """
    module_name, function_name = _target(spec.name)
    function: Any = importlib.import_module(module_name)
    for part in function_name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise ConfigError(
            f"verifier {spec.name!r}: {module_name} has no function {function_name!r}"
        )
    batched = spec.batched or getattr(function, "batched", False) is True
    _check_arguments(spec, function, [""] if batched else "")
    return Verifier(function, spec.arguments, batched, spec.name in _INSTANT)


def _check_arguments(spec: VerifierSpec, function: Single, responses: object) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some built-in callables have none
    try:
        signature.bind(responses, None, {}, **spec.arguments)
    except TypeError as exc:
        raise ConfigError(
            f"verifier {spec.name!r} cannot be called as f(response, answer, metadata, "
            f"{', '.join(spec.arguments)}): {exc}; it is f{signature}"
        ) from exc


def _target(name: str) -> tuple[str, str]:
    if name in _NOT_YET:
        raise UnavailableFeature(f"not available yet: verifier {name!r}", verifier=name)
    path = _BUILT_IN.get(name, name.removeprefix("import:"))
    module_name, _, function_name = path.partition(":")
    if module_name and function_name and ":" not in function_name:
        return module_name, function_name
    near = difflib.get_close_matches(name, _BUILT_IN, n=1)
    raise ConfigError(
        f"unknown verifier {name!r}: expected one of {sorted(_BUILT_IN)} or module:function"
        + (f"; did you mean {near[0]!r}?" if near else ""),
        verifier=name,
    )
