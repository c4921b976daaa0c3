"""A child process: the experts that the learner's float32 weights choose before and after the last step of a run.

The step is trained again from the checkpoint before it, as a recovery would.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness.child_process import serve
from gspo.common.config.loading import read_config
from gspo.common.config.schema import Config
from gspo.common.model.files import model_folder
from gspo.learner.storage.step_log import StepLog
from gspo.learner.training.trainer import Trainer
from gspo.learner.training.trainer_api import configured_hyperparameters


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """`inputs`: prompt and answer of each rollout without its last token; `starts`: the place in it from which on an
    answer's tokens are predicted; `before` and `after`: experts at these places, [T, layers, 2] each. Both policies
    stay in their folders, in float32.
    """
    run_dir, step = Path(spec["run_dir"]), spec["step"]
    given = read_config(run_dir / "config.yaml")
    config: Config = given.model_copy(update={"generation": given.generation.model_copy(update={"dtype": "float32"})})
    rows = StepLog(run_dir / "log").read(step)
    trainer = Trainer(config, model_folder(config.model))
    trainer.load(run_dir / "checkpoints" / f"step-{step - 1:06d}")
    trainer.export(Path(spec["before"]))
    trainer.train(step, rows, (), configured_hyperparameters(config, step))
    trainer.export(Path(spec["after"]))
    inputs = [[*row.prompt_token_ids.tolist(), *row.token_ids[:-1].tolist()] for row in rows]
    starts = [len(row.prompt_token_ids) - 1 for row in rows]
    experts = {name: _experts(Path(spec[name]), inputs, starts) for name in ("before", "after")}
    return {"inputs": inputs, "starts": starts, **experts}


@torch.inference_mode()
def _experts(folder: Path, inputs: list[list[int]], starts: list[int]) -> list[Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        # A router gives logits, scores and the experts' numbers [T, 2].
        layer.mlp.gate.register_forward_hook(lambda *called: chosen.append(called[-1][2]))
    answers = []
    for token_ids, start in zip(inputs, starts, strict=True):
        chosen.clear()
        model(torch.tensor([token_ids]), use_cache=False)
        answers.append(torch.stack(chosen, dim=1)[start:].tolist())
    return answers


if __name__ == "__main__":
    serve(measure)
