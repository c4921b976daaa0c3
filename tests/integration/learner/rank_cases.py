"""One rank of several, for test_trainer_ranks.py: trains the same rows under every way to share the work out.

Called by torchrun as `-m tests.integration.learner.rank_cases MODEL ALONE OUT CASE...`; rank 0 writes what each case
came to into OUT. ALONE is a checkpoint that one rank wrote. The case `others` is LAGGING and the cases of figures.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_optimizer_state
from safetensors.torch import save_file
from torch import distributed

from gspo.common.config.schema import Config
from gspo.learner.push.policy_weights import weights_from
from gspo.learner.training.trainer import Trainer
from tests.support.training import figure_cases
from tests.support.training.rollout_rows import make_config, make_rows, train, with_sets, with_version

STEP = 1
# Case -> learner keys. The others are compared with the first, on one rank.
CASES: dict[str, dict[str, Any]] = {
    "zero-0": {},
    "zero-0-padded": {"packing": False, "micro_batch_tokens": 100_000},
    "zero-1": {"zero_stage": 1},
    "zero-1-offload": {"zero_stage": 1, "offload": "optimizer"},
    "zero-2": {"zero_stage": 2},
    "zero-2-offload": {"zero_stage": 2, "offload": "optimizer"},
    "zero-3": {"zero_stage": 3},
    "zero-3-checkpointing": {"zero_stage": 3, "gradient_checkpointing": True},
    "zero-3-offload": {"zero_stage": 3, "offload": "optimizer"},
    "zero-3-offload-all": {"zero_stage": 3, "offload": "all"},
    "zero-0-one-line": {"sequence_ranks": 2},
    "zero-1-one-line": {"sequence_ranks": 2, "zero_stage": 1, "micro_batch_tokens": 131},
    "zero-3-one-line": {"sequence_ranks": 2, "zero_stage": 3, "gradient_checkpointing": True},
    "zero-3-bfloat16": {"zero_stage": 3, "dtype": "bfloat16"},
}
# Each is a mix of two others, so the nightly tests alone run it.
SELDOM = {
    "zero-0-padded",
    "zero-1",
    "zero-1-offload",
    "zero-3-checkpointing",
    "zero-3-offload",
    "zero-0-one-line",
}
OTHERS = "others"
# With a lag each keeps an earlier version's weights: the first rank, or each rank its parts. DeepSpeed leaves the
# smaller weights whole beside the parts in the last.
LAGGING: dict[str, dict[str, Any]] = {
    "zero-0": {},
    "zero-2": {"zero_stage": 2},
    "zero-3": {"zero_stage": 3},
    "zero-3-offload-all": {"zero_stage": 3, "offload": "all"},
    "zero-3-persistent": {
        "zero_stage": 3,
        "deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 4096}},
    },
}
ALGORITHM = {"pg_clip": 0.05, "use_kl_loss": True}


def case_config(model: Path, learner: dict[str, Any]) -> Config:
    """The configuration of a case: with a reference, and a smaller teacher than a rank's part of either."""
    teacher = {"path": str(model / figure_cases.TEACHER), "kl_in": "loss", "coef": 0.1}
    return make_config(model, algorithm=ALGORITHM, teacher=teacher, learner=learner)


def gradient(trainer: Trainer) -> Iterator[torch.Tensor]:
    """The first optimizer step's gradient, parameter by parameter: AdamW's first moment is a tenth of it."""
    if trainer._config.learner.zero_stage in (1, 2):  # DeepSpeed links the moments of the first group alone
        optimizer = trainer.engine.deepspeed.optimizer
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for parameter in (it for it in trainer.engine.model.parameters() if it.requires_grad):
        if trainer._config.learner.zero_stage:
            moment = safe_get_full_optimizer_state(parameter, "exp_avg")
        else:
            moment = trainer.engine.deepspeed.optimizer.state[parameter]["exp_avg"]
        yield moment.flatten().clone()


def run_case(model: Path, learner: dict[str, Any]) -> tuple[Trainer, dict[str, Any], torch.Tensor]:
    """Train one mini-batch; trainer, figures, gradient."""
    rows = make_rows(model, num_mini_batches=1)
    # Some have no advantage, so they count in the KL term alone.
    rows = [replace(row, advantage=0.0) if row.group == 3 else row for row in rows]
    trainer = Trainer(case_config(model, learner), model)
    figures = train(trainer, STEP, rows).metrics
    return trainer, figures, torch.cat(list(gradient(trainer)))


def updates_not_applied(model: Path, trainer: Trainer) -> list[str]:
    """A mini-batch that is not finite on one rank's rows alone, in the middle of others."""
    rows = make_rows(model, step=STEP + 1)
    number = next(number for number, row in enumerate(rows) if row.mini_batch == 1)
    rows[number] = replace(rows[number], advantage=math.inf)
    trained = train(trainer, STEP + 1, rows)
    return [f"{update.mini_batch}: {update.reason}" for update in trained.not_applied]


def lagging(model: Path, learner: dict[str, Any]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Two steps on rollouts of the version before the newest; figures of the second, and the policy.

    Its tokens were sampled from few others.
    """
    trainer = Trainer(make_config(model, algorithm={"pg_clip": 0.05}, learner=learner), model)
    train(trainer, 4, with_version(make_rows(model, step=4, noise=0.05), 2))
    cut = with_sets(model, make_rows(model, step=5, noise=0.05), 12, 0.05)
    figures = train(trainer, 5, with_version(cut, 3)).metrics
    return figures, trainer.engine.policy()


def moved_bytes(trainer: Trainer) -> list[int]:
    """The states go to host memory and come back; the bytes of each rank."""
    kept: list[int | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(kept, trainer.engine._states.move_to_host())
    trainer.engine.move_to_device()
    return [num_bytes for num_bytes in kept if num_bytes is not None]


def go_on(model: Path, folder: Path, learner: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The policy one step after a checkpoint."""
    trainer = Trainer(case_config(model, learner), model)
    trainer.engine.load(folder)
    train(trainer, STEP + 1, make_rows(model, step=STEP + 1))
    return trainer.engine.policy()


def other_cases(model: Path, out: Path) -> None:
    """Steps on rollouts of an earlier version, and the cases of figures."""
    for name, learner in LAGGING.items():
        figures, policy = lagging(model, learner)
        if distributed.get_rank() == 0:
            (out / f"{name}-lagging.json").write_text(json.dumps(figures))
            save_file(policy, out / f"{name}-lagging.safetensors")
    for name in figure_cases.CASES:
        figure_cases.train_case(model, name, out / f"figures-{name}")


def main() -> None:
    """Each case that is named, and a checkpoint of it from which another trainer continues."""
    model, alone, out = map(Path, sys.argv[1:4])
    names = sys.argv[4:]
    if OTHERS in names:
        names.remove(OTHERS)
        other_cases(model, out)
    for name in names:
        learner = CASES[name]
        gone_on = go_on(model, alone, learner)
        if distributed.get_rank() == 0:
            save_file(gone_on, out / f"{name}-gone-on.safetensors")
        trainer, figures, vector = run_case(model, learner)
        exact = {f"weights.{key}": value for key, value in trainer.engine.policy().items()}
        shared = trainer.engine.begin_version(STEP, "", is_reused=True)()
        trainer.engine.save(out / name, {})
        not_applied = updates_not_applied(model, trainer)
        after = trainer.engine.policy()
        again = Trainer(case_config(model, learner), model)
        again.engine.load(out / name)
        moved = moved_bytes(again)
        updates_not_applied(model, again)
        repeated = again.engine.policy()
        if distributed.get_rank() == 0:
            same = all(torch.equal(after[key], repeated[key]) for key in after)
            facts = {"figures": figures, "not_applied": not_applied, "same_after_a_resume_and_a_move": same}
            facts |= {"cards": trainer.engine.gpus, "moved_bytes": moved}
            whole = weights_from(STEP, {key: exact[f"weights.{key}"] for key in after})
            facts |= {"digests": [whole.digest, shared.digest], "owned": list(shared.bits)}
            (out / f"{name}.json").write_text(json.dumps(facts))
            save_file({"gradient": vector, **exact}, out / f"{name}.safetensors")


if __name__ == "__main__":
    main()
