"""A training step that only takes time; the weights it makes follow from the weights before, and from every row.

So a replay of the log makes the same digests, and one that trains other rows, or in another order, does not.
Not here: learning.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch import Tensor

from benchmarks.simulated.settings import Settings
from gspo.common.config.schema import Config
from gspo.common.host.durable_write import fsync
from gspo.learner.assembly.rows import Row
from gspo.learner.push.policy_weights import weights_from
from gspo.learner.training.trainer_api import Hyperparameters, MakeVersion, TrainResult, WriteCheckpoint

_STATE, _WEIGHTS, _EXPORTED = "caller.json", "weights.safetensors", "model.safetensors"
# In the folder of the environment's GSPO_CHAOS, as the files of benchmarks/chaos: the number of a step whose training
# always fails.
_FAILING_STEP = "fail-learner-0"
# Far above the rounding of any inference dtype at weights of 0.02 and more.
_CHANGE = 1e-2


class SimulatedTrainer:
    """Makes a version of each step.

    Args:
        settings: The environment's by default.
    """

    def __init__(self, config: Config, folder: Path, run_dir: Path, settings: Settings | None = None) -> None:
        self._settings, self._folder = settings or Settings.from_environment(), folder
        self._dtype = getattr(torch, config.generation.dtype)
        self._weights = _weights_of(folder)

    @property
    def has_other_ranks(self) -> bool:
        """There are no other ranks."""
        return False

    @property
    def gpus(self) -> dict[str, float | None]:
        """One, which computes nothing."""
        return {"simulated": None}

    def train(
        self,
        step: int,
        rows: Sequence[Row],
        not_applied: Collection[int],
        hyperparameters: Hyperparameters,
    ) -> TrainResult:
        """Change a share of every tensor, and take the time that training takes.

        Raises:
            ValueError: This step is asked to fail.
        """
        began = time.monotonic()
        _fail_if_asked(step)
        drawn = np.random.default_rng(_entropy(step, rows, self._weights))
        for weights in self._weights.values():
            flat = weights.reshape(-1)
            chosen = drawn.integers(0, flat.size, max(1, round(flat.size * self._settings.changed_share)))
            flat[chosen] += drawn.standard_normal(len(chosen)).astype(np.float32) * _CHANGE
            # The first one always: it is the key in answers.py.
            flat[0] += _CHANGE * (1 + drawn.random())
        num_tokens = sum(int(row.mask.sum()) for row in rows if row.skipped is None)
        wanted_s = self._settings.train_s + self._settings.train_s_per_token * num_tokens
        time.sleep(max(0.0, self._settings.time_scale * wanted_s - (time.monotonic() - began)))
        return TrainResult({"loss": 0.0, "grad_norm": 0.0})

    def begin_version(self, version: int, recorded: str, *, is_reused: bool) -> MakeVersion:
        """Copy the weights; the result makes their version."""
        tensors = self.policy()
        return lambda: weights_from(version, tensors, recorded)

    def write_share(self, version: int, folder: Path) -> None:
        """There are no other ranks."""

    def policy(self) -> dict[str, Tensor]:
        """Copies of the weights in the generators' dtype."""
        return {name: torch.from_numpy(tensor.copy()).to(self._dtype) for name, tensor in self._weights.items()}

    def save(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write the weights and the caller's state."""
        _save(folder, self._weights, state)

    def begin_save(self, folder: Path, state: Mapping[str, Any]) -> WriteCheckpoint:
        """Copy the weights; the result writes them."""
        copies = {name: tensor.copy() for name, tensor in self._weights.items()}
        return lambda _: _save(folder, copies, state)

    def load(self, folder: Path) -> dict[str, Any]:
        """Continue from the files of `save`."""
        self._weights = {name: tensor.copy() for name, tensor in load_file(folder / _WEIGHTS).items()}
        state: dict[str, Any] = json.loads((folder / _STATE).read_text())
        return state

    def export(self, folder: Path) -> None:
        """Write a copy of the model's folder with these weights."""
        unfinished = folder.with_name(folder.name + ".tmp")
        for leftover in (unfinished, folder):
            shutil.rmtree(leftover, ignore_errors=True)
        shutil.copytree(self._folder, unfinished, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file({name: tensor.numpy() for name, tensor in self.policy().items()}, unfinished / _EXPORTED)
        unfinished.rename(folder)

    def move_to_host(self) -> None:
        """There is no device."""

    def move_to_device(self) -> None:
        """There is no device."""

    def rank_heartbeat(self) -> None:
        """There are no other ranks."""

    def close(self) -> None:
        """There is nothing to end."""


def _fail_if_asked(step: int) -> None:
    file = Path(os.environ.get("GSPO_CHAOS", "")) / _FAILING_STEP
    if file.is_file() and int(file.read_text()) == step:
        raise ValueError(f"the training of step {step} always fails")


def _save(folder: Path, weights: Mapping[str, NDArray[np.float32]], state: Mapping[str, Any]) -> None:
    save_file(dict(weights), folder / _WEIGHTS)
    (folder / _STATE).write_text(json.dumps(dict(state)))
    for file in folder.iterdir():
        fsync(file)


def _weights_of(folder: Path) -> dict[str, NDArray[np.float32]]:
    """The policy's tensors in float32, tied ones once, as the generators know them."""
    tied = bool(json.loads((folder / "config.json").read_text()).get("tie_word_embeddings"))
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as part:
            for name in part.keys():  # noqa: SIM118 - no mapping
                if not (name == "lm_head.weight" and tied):
                    weights[name] = part.get_tensor(name).float().numpy().copy()
    return weights


def _entropy(step: int, rows: Sequence[Row], weights: Mapping[str, NDArray[np.float32]]) -> int:
    """A number that any other step, row, order, or weights would make another."""
    seen = sha256(str(step).encode())
    for row in rows:
        seen.update(f"{row.group},{row.number},{row.reward},{row.advantage},{row.mini_batch},{row.skipped}".encode())
        for array in (row.token_ids, row.logp, row.version, row.mask):
            seen.update(array.tobytes())
    for name in sorted(weights):
        seen.update(weights[name].reshape(-1)[:64].tobytes())
    return int.from_bytes(seen.digest()[:8], "big")
