"""Whole training steps on the GPU of tensors.py: `-m tests.support.card.cases MODELS OUT NAMES...`, also as a rank.

Each case leaves its figures in OUT/NAME.json, or the error that it ended in. A process for all of them: the device
stays in the process that has it.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import distributed

from gspo.learner.assembly.rows import Row
from gspo.learner.ranks.launcher import is_launched, own_rank
from gspo.learner.ranks.process_group import left_at_end
from gspo.learner.training.trainer import Trainer
from tests.support.card.deepspeed_on_card import use_card
from tests.support.tiny_model import make_tiny_model
from tests.support.training import figure_cases
from tests.support.training.rollout_rows import make_config, make_rows, train, with_version

MIXTURE = "mixture"
_LOSSES = Path(__file__).parents[3] / "examples" / "losses.py"
_BOUNDS = {"behavior_low": 0.99, "behavior_high": 1.01}
_CLIENTS: dict[str, Any] = {"agent": {"external": True, "sampling": "client"}, "gateway": {"replicas": 1}}
# Case -> the sections of its configuration. Formulas are in figure_cases.py; these have other tensors on the device.
STEPS: dict[str, dict[str, Any]] = {
    "reference": {"algorithm": {"use_kl_loss": True}, "learner": {"packing": False, "token_records": True}},
    "penalty": {
        "algorithm": {
            "add_token_level_kl": True,
            "old_logprobs": "recompute",
            "behavior_correction": "truncate",
            "behavior_high": 1.01,
            "ppo_epochs": 2,
        }
    },
    "outliers": {"algorithm": {"behavior_correction": "mask", "behavior_level": "token", **_BOUNDS}},
    "divergence": {"algorithm": {"objective": "dppo_kl", "importance_sampling": "token", "pg_clip": 1e-4}},
    "own_loss": {"algorithm": {"loss": {"path": str(_LOSSES), "entry": "gspo", "reference": True}}},
    "temperatures": {**_CLIENTS, "learner": {"token_records": True}},
    "adapters": {"algorithm": {"use_kl_loss": True}, "learner": {"lora": {"rank": 4}}},
    "bfloat16": {"learner": {"dtype": "bfloat16", "gradient_checkpointing": True}},
    MIXTURE: {
        "algorithm": {"old_logprobs": "recompute", "routing_replay": "learner"},
        "learner": {"learning_rate": 1e-2, "gradient_checkpointing": True},
    },
}


def _rows(model: Path, step: int = 1) -> list[Row]:
    """Four mini-batches: in the first one nothing has a gradient, in the second one a single rollout has.

    Not under a KL term: at weights that are the reference's, its gradient is rounding, from which AdamW makes a step.
    """
    rows = make_rows(model, step=step, noise=0.05)
    second = next(place for place, row in enumerate(rows) if row.mini_batch == 1)
    still = [row.mini_batch == 0 or (row.mini_batch == 1 and place != second) for place, row in enumerate(rows)]
    return [replace(row, advantage=0.0) if is_still else row for row, is_still in zip(rows, still, strict=True)]


def _steps(model: Path, steps: Sequence[tuple[int, list[Row]]], **sections: Any) -> dict[str, float]:
    """The figures of the last of some steps, with the sum over the policy after it."""
    trainer = Trainer(make_config(model, **sections), model)
    for step, rows in steps:
        figures = train(trainer, step, rows).metrics
    policy = sum(float(weight.double().abs().sum()) for weight in trainer.engine.policy().values())
    return {**figures, "policy": policy}


def _lagging(model: Path) -> dict[str, float]:
    """No token is of the newest version, so the second step measures the mismatch at the weights that were kept."""
    return _steps(model, [(step, with_version(_rows(model, step), step - 2)) for step in (4, 5)])


def _equal(model: Path) -> dict[str, float]:
    return _steps(model, [(1, [replace(row, advantage=0.0) for row in _rows(model)])])


def _not_finite(model: Path) -> dict[str, float]:
    """One mini-batch is not applied, and then a step has no rollout."""
    rows = [replace(row, advantage=math.inf) if row.mini_batch == 3 else row for row in _rows(model)]
    trainer = Trainer(make_config(model), model)
    figures = train(trainer, 1, rows).metrics
    return figures | train(trainer, 2, []).metrics | {"loss": figures["loss"]}


def _logged_teacher(model: Path) -> dict[str, float]:
    """The log-probs of a server are in the rows."""
    teacher = {"address": "http://localhost:1", "model": "teacher", "coef": 0.3}
    rows = [replace(row, teacher_logp=row.logp + np.float32(0.1)) for row in _rows(model)]
    return _steps(model, [(1, rows)], teacher=teacher)


def _resumed(model: Path) -> dict[str, float]:
    """From a checkpoint another trainer makes the same step."""
    config, rows = make_config(model, learner={"zero_stage": 2}), _rows(model)
    trainer, again = Trainer(config, model), Trainer(config, model)
    train(trainer, 1, rows)
    with TemporaryDirectory() as folder:
        trainer.engine.save(Path(folder) / "checkpoint", {})
        again.engine.load(Path(folder) / "checkpoint")
        again.engine.export(Path(folder) / "exported")
    figures, repeated = (train(each, 2, rows).metrics for each in (trainer, again))
    assert repeated == figures
    return figures


_OTHERS: dict[str, Callable[[Path], dict[str, float]]] = {
    "lagging": _lagging,
    "equal": _equal,
    "not_finite": _not_finite,
    "logged_teacher": _logged_teacher,
    "resumed": _resumed,
}
CASES = (*STEPS, *_OTHERS)


def make_models(folder: Path) -> Path:
    """Write the policies of the cases, one in the folder of the other, and return it."""
    make_tiny_model(folder / MIXTURE, scale=4.0, num_experts=4)
    return figure_cases.make_figure_models(folder)


def figures_of(case: str, models: Path) -> dict[str, float]:
    """The figures of a case on this process's device."""
    if case in _OTHERS:
        return _OTHERS[case](models)
    model, sections = models / MIXTURE if case == MIXTURE else models, STEPS[case]
    has_kl = sections.get("algorithm", {}).get("use_kl_loss", False)
    return _steps(model, [(1, make_rows(model) if has_kl else _rows(model))], **sections)


def main() -> None:
    """Every case named; with several ranks the first error ends them all, since the others would wait."""
    models, out = map(Path, sys.argv[1:3])
    use_card()
    with left_at_end():
        for case in sys.argv[3:]:
            try:
                if case in figure_cases.CASES:
                    figure_cases.train_case(models, case, out / case)
                    continue
                result: dict[str, Any] = figures_of(case, models)
            except Exception:
                if is_launched():
                    raise
                result = {"error": traceback.format_exc()}
            if not own_rank():
                (out / f"{case}.json").write_text(json.dumps(result))
    assert not distributed.is_initialized(), "NCCL warns of a group that is left to the end of the process"


if __name__ == "__main__":
    main()
