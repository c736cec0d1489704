"""`[teacher]`: the teacher of on-policy distillation."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from configs.section import PositiveSeconds, RunPath, Section, one_or_many


class Teacher(Section):
    """The teacher. Exactly one of `path` and `url`; it shares the student's vocabulary."""

    path: RunPath | None = None
    """Model folder; the trainer holds the teacher."""
    url: Annotated[tuple[str, ...], BeforeValidator(one_or_many)] = ()
    """One address or a list of them: servers of the teacher, of SGLang's contract. Each response is
    scored by one of them, at temperature 1, before it is trained on."""
    token_env: str | None = None
    """Name of the environment variable that holds the bearer token of `url`; on a cluster it comes
    from `launch.secrets`. Absent: no token."""
    deadline: PositiveSeconds = 300.0
    """Longest wait for one answer of `url`; three are tried, then the group is sent back."""
    concurrency: int = Field(default=64, ge=1)
    """Most responses under way to one address of `url`; more wait here, not there."""
    coef: float = Field(default=1.0, gt=0)
    """Weight of the teacher's term."""
    top_k: int = Field(default=0, ge=0)
    """0: an advantage from sampled tokens; K: reverse KL over the teacher's K tokens and a rest."""
