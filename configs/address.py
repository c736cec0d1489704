"""Addresses of services: what one looks like, and that it holds no login.

An address is logged, recorded and shown; whatever stands in it is no secret.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_LOGIN = re.compile(r"://[^\s/?#]*@")
_PERHAPS_LOGIN = re.compile(r"://.*@", re.DOTALL)


def has_login(text: str) -> bool:
    """Some address in the text has a user or a password in front of its host."""
    return _LOGIN.search(text) is not None


def without_login(text: str) -> str:
    """The text with whatever could be a login hidden, also that of a malformed address."""
    return _PERHAPS_LOGIN.sub("://(hidden)@", text)


def why_no_address(text: str, *, is_base: bool = False) -> str | None:
    """Why a text is no ``http://host:port/...`` for us; None where it is one.

    Args:
        text: as it was given. The answer quotes nothing of it.
        is_base: paths are put behind it, so that a query or a fragment has no place in it.
    """
    if not text.startswith(("http://", "https://")):
        return "not an address"
    if has_login(text):
        return "an address with a user or a password in it, which would be logged and recorded"
    if re.search(r"[\s\\\x00-\x1f]", text):
        return "not an address: blanks or backslashes in it"
    try:
        parts = urlsplit(text)
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return "not an address: its host or port cannot be read"
    if not is_whole:
        return "not an address: no host, or port 0"
    if is_base and (parts.query or parts.fragment):
        return "not a base address: paths are put behind it, and it has a query or a fragment"
    return None
