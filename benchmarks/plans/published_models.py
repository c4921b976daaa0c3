"""Profiles of published models, as `gspo plan` counts them from their config.json. It counts none itself."""

from __future__ import annotations

import json
from pathlib import Path

from gspo.common.planning.model_profile import ModelProfile


def published_models() -> dict[str, ModelProfile]:
    """By name; profiles.json beside this module holds one in each line."""
    profiles = json.loads(Path(__file__).with_name("profiles.json").read_text())
    return {name: ModelProfile.from_json(json.dumps(content)) for name, content in profiles.items()}
