"""How far a tracker has been served: `tracking/NAME.json` in the run directory."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = "tracking"


@dataclass
class TrackerPosition:
    """What has been sent.

    Attributes:
        run_id: By which the tracker knows the run, over all its sessions.
        offsets: Bytes of each log file that have been sent.
        num_sent: Records sent in all.
        last_step: Highest step among them.
    """

    path: Path
    run_id: str = field(default_factory=lambda: secrets.token_hex(4))
    offsets: dict[str, int] = field(default_factory=dict)
    num_sent: int = 0
    last_step: int = -1

    @classmethod
    def read(cls, run_dir: Path, name: str) -> TrackerPosition:
        """Where an earlier session of this tracker ended; the beginning where there was none."""
        path = run_dir / FOLDER / f"{name}.json"
        return cls(path, **json.loads(path.read_text())) if path.exists() else cls(path)

    def write(self) -> None:
        """Remember it; a reader sees the old content or the new one."""
        self.path.parent.mkdir(exist_ok=True)
        unfinished = self.path.with_name(self.path.name + ".tmp")
        facts = {name: value for name, value in asdict(self).items() if name != "path"}
        unfinished.write_text(json.dumps(facts) + "\n")
        unfinished.replace(self.path)
