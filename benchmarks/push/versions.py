"""The versions that push_updates.py wrote, as the learner publishes them; the folder is made at the first call."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.child_process import run_child
from benchmarks.harness.sizes import CACHE

if TYPE_CHECKING:
    from gspo.learner.push.policy_weights import PolicyWeights

RATES = (1e-6, 3e-6, 1e-5)
VERSIONS = 3
FOLDER = CACHE / "push"
_MAKE_S = 1200.0


def model() -> Path:
    """The folder of the model that all versions come from."""
    if not FOLDER.exists():
        half_made = FOLDER.with_suffix(".tmp")
        shutil.rmtree(half_made, ignore_errors=True)
        spec = {"folder": str(half_made), "rates": RATES, "versions": VERSIONS}
        run_child("push.version_trainer", spec, timeout_s=_MAKE_S)
        half_made.rename(FOLDER)
    return FOLDER / "model"


def policy(rate: float, version: int, *, number: int | None = None) -> PolicyWeights:
    """A version of a learning rate; version 0 is the model itself. `number` is what it is called."""
    from safetensors.torch import load_file

    from gspo.learner.push.policy_weights import weights_from

    file = FOLDER / f"{rate:g}-{version}.safetensors" if version else FOLDER / "model/model.safetensors"
    return weights_from(version if number is None else number, load_file(file))
