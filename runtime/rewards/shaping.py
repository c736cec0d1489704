"""Reward shaping that looks at length only."""

from __future__ import annotations


def overlong_penalty(
    num_tokens: int, *, max_tokens: int, buffer_tokens: int, penalty: float = 1.0
) -> float:
    """What to add to the reward of a response of this length: 0 down to -``penalty``.

    0 up to ``max_tokens - buffer_tokens``, then linear, -``penalty`` from ``max_tokens`` on.

    Args:
        num_tokens: tokens of the response, the stop token included.
        max_tokens: the cap of responses, ``rollout.max_response_tokens``.
        buffer_tokens: how many last tokens before the cap are punished; 0 switches it off.
        penalty: taken at the cap, in reward units.

    Raises:
        ValueError: if the buffer is longer than the response may be, or negative.

    Source: Yu et al. 2025 (DAPO), soft overlong punishment, equation 13.
    """
    if not 0 <= buffer_tokens <= max_tokens:
        raise ValueError(f"an overlong buffer of {buffer_tokens} before a cap of {max_tokens}")
    if not buffer_tokens:
        return 0.0
    over = num_tokens - (max_tokens - buffer_tokens)
    return -penalty * min(max(over / buffer_tokens, 0.0), 1.0)
