"""The form in which our plugin takes buckets: its name, and what it says about a broadcast.

Both sides read this, the server's in an environment of its own: nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Sequence

NAME = "milepost"
"""``load_format`` of a call whose weights come in our form."""


def broadcast_format(sizes: Sequence[int]) -> str:
    """``load_format`` of a broadcast of several buckets in one call.

    Args:
        sizes: how many of the announced tensors each bucket holds, in order.
    """
    return f"{NAME}:{','.join(map(str, sizes))}"


def is_broadcast(load_format: str | None) -> bool:
    """Whether a broadcast is announced in our form, however well."""
    return (load_format or "").startswith(f"{NAME}:")


def sizes_of(load_format: str) -> list[int]:
    """Tensors of each bucket.

    Args:
        load_format: of a broadcast in our form.

    Raises:
        ValueError: if it says no sizes, or one that is not positive.
    """
    found = [int(size) for size in load_format.partition(":")[2].split(",")]
    if min(found) <= 0:
        raise ValueError(f"{load_format} names a bucket without tensors")
    return found
