"""Rules across fields: what one section cannot know about another.

Each rule is a generator of findings over a whole, well-typed run; none reads anything but its
arguments. ``check`` runs them all, so that every broken rule shows at once. What needs files is in
``configs.inputs``.
"""

from __future__ import annotations

from configs.rules.addresses import ADDRESS_RULES
from configs.rules.finding import Finding
from configs.rules.inputs import INPUT_RULES
from configs.rules.launching import LAUNCH_RULES
from configs.rules.layout import LAYOUT_RULES
from configs.rules.training import TRAINING_RULES
from configs.run import RunSpec
from configs.shape import ModelShape

__all__ = ["Finding", "check"]

_RULES = (*INPUT_RULES, *ADDRESS_RULES, *TRAINING_RULES, *LAYOUT_RULES, *LAUNCH_RULES)


def check(spec: RunSpec, shape: ModelShape | None = None) -> list[Finding]:
    """Every rule the run breaks.

    Args:
        spec: a run whose fields are each of the right type.
        shape: its model's shape, where known; rules about heads, layers and experts need it.
    """
    return [finding for rule in _RULES for finding in rule(spec, shape)]
