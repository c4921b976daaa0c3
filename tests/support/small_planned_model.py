"""A model of 170 M parameters as `gspo plan` counts it: by its config.json, without weights."""

from __future__ import annotations

import json
from pathlib import Path

from gspo.cli.processes.planned_memory import PlannedModel
from gspo.common.model.trained_parameters import TrainedSize
from gspo.learner.model.profile import profile

_SMALL = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768,
    "tie_word_embeddings": True,
}  # fmt: skip


def small_planned_model(folder: Path, *, max_positions: int) -> PlannedModel:
    """The counted model; its config.json stays in `folder`."""
    (folder / "config.json").write_text(json.dumps({**_SMALL, "max_position_embeddings": max_positions}))
    counted = profile(folder)
    return PlannedModel(TrainedSize(counted.num_parameters, counted.num_parameters), counted)
