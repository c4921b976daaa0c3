"""A child process: writes one of the benchmark's models, so that the benchmark itself loads no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness.child_process import serve
from tests.support.tiny_model import make_tiny_model

_ENDS = ("eos_token", "eos_token_id")


def make(spec: dict[str, Any]) -> dict[str, Any]:
    """Write a model folder; without `ends` no file of it names an end-of-sequence token."""
    folder = make_tiny_model(Path(spec["folder"]), hidden_size=spec["hidden_size"], layers=spec["layers"])
    if not spec["ends"]:
        _remove_end(folder)
    return {}


def _remove_end(folder: Path) -> None:
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text())
        if any(content.pop(key, None) is not None for key in _ENDS):
            path.write_text(json.dumps(content, indent=2))


if __name__ == "__main__":
    serve(make)
