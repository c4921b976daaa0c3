"""What every section of the configuration is made of.

It names no key. Neighbours: config.py and the files of its sections.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints
from pydantic.config import JsonDict

RunName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
VersionText = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8,64}$")]
# Marks a key that may change when a run is resumed.
ON_RESUME: JsonDict = {"on_resume": True}


class Section(BaseModel):
    """A part of the configuration: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
