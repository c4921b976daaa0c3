"""The memory of training, from the configuration and the model's files; no model is loaded.

It counts no activations: they depend on learner.micro_batch_tokens and on the model's code.
"""

from __future__ import annotations

from collections.abc import Sequence

from gspo.common.config.learner import LoraConfig
from gspo.common.config.schema import Config
from gspo.common.model.files import ALL_LINEAR, ModelFiles, is_fused, is_stacked

FLOAT32_BYTES = 4


def training_bytes(config: Config, files: ModelFiles, ranks: int) -> tuple[float, float]:
    """Bytes that one of so many ranks holds: on its device, and offloaded to the host.

    Under LoRA only adapters have gradients and moments, and the base is its own reference.
    """
    learner, stage = config.learner, config.learner.zero_stage
    trained = num_trained(learner.lora, files)
    num_weights = files.num_parameters + (trained if learner.lora.rank else 0)
    weights = FLOAT32_BYTES * num_weights / (ranks if stage == 3 else 1)
    gradients = FLOAT32_BYTES * trained / (ranks if stage >= 2 else 1)
    # AdamW's two moments; under ZeRO also a copy of its own of the weights that a rank updates.
    states = FLOAT32_BYTES * trained * (3 / ranks if stage else 2)
    offloaded = {"none": 0.0, "optimizer": states, "all": states + weights}[learner.offload]
    has_copy = config.algorithm.needs_reference and not learner.lora.rank
    reference = FLOAT32_BYTES * files.num_parameters / (ranks if stage == 3 else 1) if has_copy else 0
    return weights + gradients + states + reference - offloaded, offloaded


def host_bytes(files: ModelFiles, training: tuple[float, float], *, on_gpu: bool) -> float:
    """Bytes of the machine's own memory for a rank, from the result of `training_bytes`.

    On a GPU these are the offloaded bytes, and at the start the whole policy, which is loaded there before it moves.
    """
    on_device, on_host = training
    return max(on_host, FLOAT32_BYTES * files.num_parameters) if on_gpu else on_device + on_host


def snapshot_bytes(config: Config, files: ModelFiles) -> int:
    """Bytes of the first rank's snapshot in host memory: with a lag, one earlier version of the trained weights."""
    return FLOAT32_BYTES * num_trained(config.learner.lora, files) if config.staleness.max_lag else 0


def num_trained(lora: LoraConfig, files: ModelFiles) -> int:
    """Parameters that the optimizer updates; all of a pickle's, which is not looked into."""
    if not lora.rank or not files.linear:
        return files.num_parameters
    layers = files.linear if lora.target_modules == (ALL_LINEAR,) else layers_of(lora.target_modules, files)
    return sum(_num_of_adapter(layer, files.linear[layer], lora.rank) for layer in layers)


def _num_of_adapter(layer: str, shape: Sequence[int], rank: int) -> int:
    num_out, num_in = shape
    # Two matrices of an expert that a loaded model holds as one: an adapter of twice the rank is over both.
    return rank * (num_in + (2 if is_stacked(layer) and is_fused(layer) else 1) * num_out)


def layers_of(names: Sequence[str], files: ModelFiles) -> list[str]:
    """The layers that these names choose, by whole parts from the end as peft does."""
    return [layer for layer in files.linear if any(f".{layer}".endswith(f".{name}") for name in names)]
