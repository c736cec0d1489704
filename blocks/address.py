"""The address of a service, as blocks take it: without the login that has fields of its own."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from configs.address import why_no_address


def _checked(text: str) -> str:
    if (why := why_no_address(text, is_base=True)) is not None:
        raise ValueError(
            f"{why}; give http://host:port alone: a login has fields of its own, which are secret"
        )
    return text.rstrip("/")


Address = Annotated[str, AfterValidator(_checked)]
"""``http://host:port``; no user, no password, no slash at the end."""
