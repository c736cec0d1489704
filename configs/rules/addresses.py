"""Addresses of services and stores: well formed, and none with a login in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from configs.address import has_login, why_no_address
from configs.rules.finding import Finding, refused
from configs.rules.inputs import Rule
from configs.run import RunSpec
from configs.section import Section
from configs.shape import ModelShape

_IN_PLACE_OF_A_LOGIN = {
    "teacher.url": 'the address alone; teacher.token_env = "NAME" of a variable with its token',
    "launch.env": "the name of a secret of the scheduler, in launch.secrets",
    "checkpoint.upload": "the bucket alone; credentials come from the environment (AWS_...)",
    "output.compiler_cache": "the bucket alone; credentials come from the environment (AWS_...)",
}


def _addresses(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    reward, launch, teacher = spec.reward, spec.launch, spec.teacher
    given: dict[str, tuple[str | None, ...]] = {
        "reward.url": (reward.url,),
        "reward.code.url": (reward.code.url if reward.code else None,),
        "reward.judge.url": (reward.judge.url if reward.judge else None,),
        "teacher.url": teacher.url if teacher else (),
        "launch.cluster": (launch.cluster if launch.backend == "ray" else None,),
    }
    for field, urls in given.items():
        for number, url in enumerate(urls, start=1):
            if url is None or has_login(url):  # _logins says that
                continue
            why = why_no_address(url, is_base=field in ("teacher.url", "launch.cluster"))
            if why is not None:
                which = f"the {number}. of {len(urls)}: " if len(urls) > 1 else ""
                yield refused(
                    field,
                    because=which + why,
                    allowed='"http://host:port"',
                    # It may be a login without its http://.
                    is_hidden="@" in url,
                )
    upload = spec.checkpoint.upload
    if upload is not None and not (upload.startswith("s3://") and len(upload) > len("s3://")):
        yield refused(
            "checkpoint.upload",
            because="not an object store",
            allowed='"s3://bucket/prefix"',
            is_hidden="@" in upload,
        )


def _logins(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    """Of every text of the file: what is an address is each reader's own business."""
    fields = dict.fromkeys(field for field, text in _texts(spec, "") if has_login(text))
    for field in fields:
        yield refused(
            field,
            because="an address with a user or a password in it, which would be logged and "
            "recorded; change that password, it is in a file now",
            allowed=next(
                (text for own, text in _IN_PLACE_OF_A_LOGIN.items() if field.startswith(own)),
                "the address alone",
            ),
            is_hidden=True,
        )


def _texts(value: object, field: str) -> Iterator[tuple[str, str]]:
    """Every text of a value with the dotted field it stands in."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, Path):
        # A path loses one of the two slashes.
        yield field, str(value).replace(":/", "://")
    elif isinstance(value, tuple | list):
        for each in cast("tuple[object, ...]", value):
            yield from _texts(each, field)
    elif isinstance(value, Mapping):
        for key, each in cast("Mapping[str, object]", value).items():
            yield from _texts(each, f"{field}.{key}")
    elif isinstance(value, Section):
        for name, about in type(value).model_fields.items():
            own = about.alias or name
            yield from _texts(getattr(value, name), f"{field}.{own}" if field else own)


ADDRESS_RULES: tuple[Rule, ...] = (_addresses, _logins)
