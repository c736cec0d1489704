"""A broken rule."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Values that are each allowed and do not go together."""

    fields: tuple[str, ...]
    """Dotted fields that take part. The first that the file sets is where the problem is shown."""
    message: str
    """What does not go together, and why."""
    allowed: str | None = None
    """What would be right."""
    nearest: str | None = None
    is_warning: bool = False
    """The run may start all the same."""
    is_hidden: bool = False
    """What the file says there may hold a secret: it is not shown."""

    def touches(self, fields: set[str]) -> bool:
        """One of its fields, or a table one lies in, is in ``fields``."""
        return any(
            field == own or own.startswith(field + ".") or field.startswith(own + ".")
            for own in self.fields
            for field in fields
        )


def refused(
    *fields: str, because: str, allowed: str | None = None, is_hidden: bool = False
) -> Finding:
    """A combination that no run can have."""
    return Finding(fields=fields, message=because, allowed=allowed, is_hidden=is_hidden)


def warned(*fields: str, because: str) -> Finding:
    """A combination that is probably not what was meant."""
    return Finding(fields=fields, message=because, is_warning=True)
