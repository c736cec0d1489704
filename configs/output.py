"""`[output]` and `[tracking]`: where results go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.section import RunPath, Seconds, Section, StorePlace


class Output(Section):
    """The output root and what is written beside the run's own files."""

    root: RunPath
    """Output root of the run: the truth about it. Shared between nodes where there are several."""
    export_hf: bool = False
    """Write the final weights as a Hugging Face model into `export/`."""
    compiler_cache: StorePlace | None = None
    """Where archives of compiler caches are kept, a folder or `s3://bucket/prefix`; absent:
    nowhere."""
    cache_publishers: int = Field(default=2, ge=1)
    """Processes per node that publish compiler caches."""
    cache_wait: Seconds = 60.0
    """The one wait all publishers share."""


class Tracking(Section):
    """W&B and the local sink. A tracking failure stops nothing."""

    mode: Literal["online", "offline", "disabled"] = "offline"
    """W&B mode; `online` without a key becomes offline, without a prompt."""
    project: str = "milepost"
    """W&B project."""
    group: str | None = None
    """W&B group; absent: the run's name."""
    entity: str | None = None
    """W&B entity; absent: the key's own."""
    local: bool = True
    """Also write the series as JSON lines under the output root."""
