"""Names in the environment: Milepost's own variables, and those the launcher owns."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping

PREFIX = "MILEPOST_"
ALIAS_PREFIXES = ("MILES_", "OI_MILES_")

ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_OWNED_NAMES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "NVIDIA_VISIBLE_DEVICES",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "HF_MODULES_CACHE",
    }
)
_OWNED_PREFIXES = ("RAY_", "TORCHELASTIC_", "BEAKER_REPLICA_", "BEAKER_LEADER_")

_TOKEN_PREFIXES = (
    "hf_", "sk-", "sk_", "ghp_", "gho_", "ghu_", "ghs_", "github_pat_", "glpat-", "xoxb-", "xoxp-",
    "AKIA", "ASIA", "AIza", "eyJ", "wandb_v1_", "nvapi-", "pypi-", "npm_", "dckr_pat_", "-----B",
)  # fmt: skip
_HEX_TOKEN = re.compile(r"[0-9a-fA-F]{32,}")
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_ENTROPY_MIN_LENGTH = 20
_ENTROPY_BITS = 3.3


class ConflictingNamesError(ValueError):
    """Two spellings of one variable are set to different values."""


def read_variable(name: str, environ: Mapping[str, str]) -> str | None:
    """Value of ``MILEPOST_<name>``, with ``MILES_`` and ``OI_MILES_`` read as aliases.

    Args:
        name: without its prefix, for instance ``BASE_IMAGE``.
        environ: usually ``os.environ``.

    Returns:
        The value, or None when no spelling is set.

    Raises:
        ConflictingNamesError: if two spellings are set to different values.
    """
    found = {
        prefix + name: environ[prefix + name]
        for prefix in (PREFIX, *ALIAS_PREFIXES)
        if prefix + name in environ
    }
    if len(set(found.values())) > 1:
        raise ConflictingNamesError(
            f"{' and '.join(found)} name one variable and have different values; unset one"
        )
    return next(iter(found.values()), None)


def is_owned(name: str) -> bool:
    """The launcher sets this variable itself: Ray, ranks, GPU masks, rendezvous."""
    return name in _OWNED_NAMES or name.startswith(_OWNED_PREFIXES)


def has_token_prefix(text: str) -> bool:
    """The text starts like the tokens of a known service and goes on long enough to be one."""
    return len(text) >= 16 and text.startswith(_TOKEN_PREFIXES)


def looks_like_token(text: str) -> bool:
    """The text has the shape of a secret itself rather than of a secret's name.

    Known prefixes, long hexadecimal, UUIDs, or an unbroken run of letters and digits too random to
    be words. Names are words joined by ``-``, ``_`` or ``.``, so only unbroken runs are measured.
    """
    if has_token_prefix(text) or _UUID.fullmatch(text) is not None:
        return True
    return any(_is_random(run) for run in re.split(r"[^A-Za-z0-9]+", text))


def _is_random(run: str) -> bool:
    if _HEX_TOKEN.fullmatch(run) is not None:
        return True
    kinds = (any(map(str.isdigit, run)), any(map(str.islower, run)), any(map(str.isupper, run)))
    if len(run) < _ENTROPY_MIN_LENGTH or sum(kinds) < 2:
        return False
    return _entropy(run) >= _ENTROPY_BITS


def _entropy(text: str) -> float:
    counts = Counter(text).values()
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts)
