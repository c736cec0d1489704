"""The base of every section, and the value types a run file uses."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

_DURATION = re.compile(
    r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?"
)
_DURATION_FACTORS = (86400.0, 3600.0, 60.0, 1.0)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]iB|B)")
_SIZE_FACTORS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class Section(BaseModel):
    """A table of the run file: frozen, strict about types, closed to unknown keys.

    The string under a field documents it; `configs.reference` collects them.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
    )

    aliases: ClassVar[dict[str, str]] = {}
    """Other spellings a run file may use → the field's own name."""

    @model_validator(mode="before")
    @classmethod
    def _settle_aliases(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data  # pyright: ignore[reportUnknownVariableType]  # model_type reports it
        table = dict(cast("dict[str, Any]", data))
        for alias, name in cls.aliases.items():
            if alias not in table:
                continue
            value = table.pop(alias)
            if name in table and table[name] != value:
                raise PydanticCustomError(
                    "alias_conflict",
                    "{alias} is another spelling of {name}; the two have different values",
                    {"alias": alias, "name": name, "key": alias, "allowed": "one of the two keys"},
                )
            table[name] = value
        return table


def nested_section(annotation: object) -> type[Section] | None:
    """The section a field holds: itself, optional, or as the values of a table; otherwise None."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    found = (nested_section(argument) for argument in get_args(annotation))
    return next((inner for inner in found if inner is not None), None)


def refuse(message: str, *, allowed: str | None = None) -> PydanticCustomError:
    """An error of one field that says what would be right; braces in values are kept."""
    return PydanticCustomError("refused", "{text}", {"text": message, "allowed": allowed})


def parse_duration(value: object) -> object:
    """Seconds of ``"4h"``, ``"30m"``, ``"90s"``, ``"1h30m"``; a bare number is seconds.

    Raises:
        PydanticCustomError: if the text is no duration, or the number is negative or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise refuse("not a duration", allowed=_DURATION_FORMS)
    if isinstance(value, str):
        text = value.strip()
        match = _DURATION.fullmatch(text)
        if text == "0":
            return 0.0
        if match is None or not any(match.groups()):
            raise refuse("not a duration", allowed=_DURATION_FORMS)
        parts = zip(match.groups(), _DURATION_FACTORS, strict=True)
        return sum(float(number) * factor for number, factor in parts if number is not None)
    if not math.isfinite(value) or value < 0:
        raise refuse("a duration is finite and not negative", allowed=_DURATION_FORMS)
    return float(value)


_DURATION_FORMS = 'a duration such as "4h", "30m" or "90s"; a bare number is seconds'


def parse_size(value: object) -> object:
    """Bytes of ``"256 GiB"``; a bare integer is bytes.

    Raises:
        PydanticCustomError: if the text is no size, or the number is not positive.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise refuse("not a size", allowed=_SIZE_FORMS)
        value = int(float(match[1]) * _SIZE_FACTORS[match[2]])
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise refuse("not a size", allowed=_SIZE_FORMS)
    return value


_SIZE_FORMS = 'a size such as "256 GiB" or "512 MiB"; a bare integer is bytes'


def resolve_path(value: object, info: ValidationInfo) -> object:
    """An absolute path. Relative ones count from the folder of the run file, given as context.

    Raises:
        PydanticCustomError: on ``~``, ``$``, an empty text, or a relative path without a folder.
    """
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise refuse("not a path", allowed="a path, absolute or relative to the run file")
    if value.startswith("~") or "$" in value:
        raise refuse(
            "nothing is expanded from the environment: ~ and $VAR are refused",
            allowed="the path written out; a relative one counts from the folder of the run file",
        )
    path = Path(value)
    if not path.is_absolute():
        context = cast("dict[str, Any] | None", info.context)
        folder = context.get("folder") if context else None
        if folder is None:
            raise refuse(
                "a relative path needs the folder of its run file", allowed="an absolute path"
            )
        path = Path(folder) / path
    # normpath, not resolve: a link to a mount must stay the name the job will see.
    return Path(os.path.normpath(path))


def _as_tuple(value: object) -> object:
    return tuple(cast("list[object]", value)) if isinstance(value, list) else value


def one_or_many(value: object) -> object:
    """A single text where a list of texts is meant."""
    return (value,) if isinstance(value, str) else _as_tuple(value)


def import_path(value: object) -> object:
    """``package.module:name``.

    Raises:
        PydanticCustomError: if the text is anything else.
    """
    if not isinstance(value, str) or IMPORT_PATH.fullmatch(value) is None:
        raise refuse("not an import path", allowed='"package.module:name"')
    return value


IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


Seconds = Annotated[float, BeforeValidator(parse_duration)]
"""A duration: float seconds, never negative."""

PositiveSeconds = Annotated[float, BeforeValidator(parse_duration), Field(gt=0)]
"""A duration above 0."""

Bytes = Annotated[int, BeforeValidator(parse_size)]
"""A size: bytes, positive."""


def resolve_store(value: object, info: ValidationInfo) -> object:
    """``s3://bucket/prefix`` as it is, or an absolute path as ``resolve_path`` makes it.

    Raises:
        PydanticCustomError: on an address without a bucket, or as ``resolve_path`` says.
    """
    if isinstance(value, str) and "://" in value:
        if not re.fullmatch(r"s3://[^/]+(/.*)?", value):
            raise refuse("not an object store", allowed='"s3://bucket/prefix", or a folder')
        return value.rstrip("/")
    return resolve_path(value, info)


StorePlace = Annotated[Path | str, PlainValidator(resolve_store, json_schema_input_type=str)]
"""A folder, or ``s3://bucket/prefix``."""

RunPath = Annotated[Path, PlainValidator(resolve_path, json_schema_input_type=str)]
"""An absolute, normalised path."""

Texts = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
"""A list of texts."""

ImportPath = Annotated[str, BeforeValidator(import_path)]
"""``package.module:name``."""

Scalar = str | int | float | bool
"""A value of an open table: arguments of a verifier or an engine."""
