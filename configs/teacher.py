"""`[teacher]`: the teacher of on-policy distillation."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from configs.section import RunPath, Section, one_or_many


class Teacher(Section):
    """The teacher. Exactly one of `path` and `url`; it shares the student's vocabulary."""

    path: RunPath | None = None
    """Model folder; the trainer holds the teacher."""
    url: Annotated[tuple[str, ...], BeforeValidator(one_or_many)] = ()
    """One address or a list of them: SGLang servers of the teacher."""
    coef: float = Field(default=1.0, gt=0)
    """Weight of the teacher's term."""
    top_k: int = Field(default=0, ge=0)
    """0: an advantage from sampled tokens; K: reverse KL over the teacher's K tokens and a rest."""
