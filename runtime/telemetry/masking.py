"""Secrets out of text: by their shape, by the name they stand under, by this process's own.

The net is the finished line, so that nested values, tracebacks and foreign libraries' messages pass
it too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping

MASK = "***"

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:password|passwd|passphrase|secret|api_?key|access_?key|secret_?key|private_?key|"
    r"credentials?|authorization|auth|bearer|token)$",
    re.IGNORECASE,
)
_NAMED_VALUE = (
    r'(?P<name>"[A-Za-z0-9_.\-]*(?:password|passwd|passphrase|secret|api_?key|access_?key|secret_?key|'
    r'private_?key|credentials?|authorization|_token|"token)"\s*:\s*")(?:[^"\\]|\\.)*(?=")'
)
_SHAPES = (
    r"\bhf_[A-Za-z0-9]{20,}",
    r"\bsk-[A-Za-z0-9_\-]{20,}",
    r"\bgh[pousr]_[A-Za-z0-9]{20,}",
    r"\bgithub_pat_[A-Za-z0-9_]{20,}",
    r"\bglpat-[A-Za-z0-9_\-]{16,}",
    r"\bxox[abposr]-[A-Za-z0-9\-]{10,}",
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    r"\bpn[ub]_[A-Za-z0-9]{20,}",
    r"\bwandb_v1_[A-Za-z0-9_\-]{20,}",
    r"\blocal-[0-9a-f]{40}\b",
    r"\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]*",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[^\"\\]|\\.)*?(?:-----END [A-Z ]*-----|(?=\")|$)",
)
_ESCAPE = r"(?P<escape>\\(?:u[0-9a-f]{4}|.))"
_BEARER = r"(?P<scheme>\b(?:[Bb]earer|[Bb]asic) )[A-Za-z0-9._~+/=\-]{12,}"
_USERINFO = r"(?P<user>\b[a-z][a-z0-9+.\-]*://[^\s/@:\"]*:)[^\s/@\"]+(?=@)"


def is_secret_name(name: str) -> bool:
    """``HF_TOKEN``, ``api_key``, ``authorization`` are; ``num_tokens``, ``token_ids`` are not."""
    return _SECRET_NAME.search(name) is not None


class Masker:
    """Replaces secrets in text by ``***``.

    Args:
        environment: values under secret-shaped names of at least 8 characters are masked wherever
            they appear; the process's own environment by default. Read once, here.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        env = os.environ if environment is None else environment
        known = sorted(
            {v for name, v in env.items() if is_secret_name(name) and len(v) >= 8},
            key=len,
            reverse=True,
        )
        self._plain = _pattern([re.escape(v) for v in known])
        # Escapes are stepped over whole: no match begins inside one, the line stays JSON.
        self._line = _pattern([*(re.escape(json.dumps(v)[1:-1]) for v in known), _ESCAPE])

    def mask(self, text: str) -> str:
        """Plain ``text`` without its secrets."""
        return self._plain.sub(_keep_lead, text)

    def mask_line(self, line: str) -> str:
        """A line of JSON (ASCII only) without its secrets; still JSON."""
        return self._line.sub(_keep_lead, line)


def _pattern(first: list[str]) -> re.Pattern[str]:
    return re.compile("|".join([*first, _NAMED_VALUE, _BEARER, _USERINFO, *_SHAPES]))


def _keep_lead(match: re.Match[str]) -> str:
    groups = match.groupdict()
    if groups.get("escape"):
        return match[0]
    return (groups["name"] or groups["scheme"] or groups["user"] or "") + MASK
