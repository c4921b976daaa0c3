"""The learner's side of the parts: its configuration, rollouts as rows, and its log-probs of what vLLM sampled.

It imports no vLLM: a training step needs none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.loading import parse_config
from gspo.generation.engine.api import Completion
from gspo.learner.assembly.rows import Row
from gspo.learner.model.batch import StepBatch, rank_micro_batches
from gspo.learner.model.network import can_be_packed, load_policy_model
from tests.gpu.part_run import PartRun
from tests.support.training.rollout_rows import row_of


@dataclass(frozen=True)
class LogprobDifference:
    """vLLM's log-probs minus the learner's, over the tokens of all answers.

    Attributes:
        means: Those of each answer.
    """

    std: float
    largest: float
    mean: float
    means: NDArray[np.float64]

    @property
    def noise_share(self) -> float:
        """Share of the answers that this alone puts outside GSPO's default clip."""
        low, high = AlgorithmConfig(prompt_length=1, response_length=1).clip
        moved = np.expm1(-self.means)  # the ratio is the learner's over the engine's
        return float(((moved < -low) | (moved > high)).mean())


def rows_of(prompts: Sequence[list[int]], completions: Sequence[Completion], num_in_group: int = 4) -> list[Row]:
    """Answers as the learner gets them."""
    return [
        row_of(
            step=1,
            group=number // num_in_group,
            number=number % num_in_group,
            prompt_token_ids=np.array(prompt, dtype=np.int32),
            token_ids=np.array(done.token_ids, dtype=np.int32),
            logp=np.array(done.logp, dtype=np.float32),
            version=np.array(done.version, dtype=np.int32),
            mask=np.ones(len(done.token_ids), dtype=np.bool_),
            reward=float(number % 2),
            advantage=float(number % 2) - 0.5,
            mini_batch=0,
            temperature=1.0,
            num_rollouts=num_in_group,
        )
        for number, (prompt, done) in enumerate(zip(prompts, completions, strict=True))
    ]


def learner_config(
    case: PartRun, model: Path, dtype: str, *, lengths: tuple[int, int] | None = None, **learner: Any
) -> Any:
    """A configuration of the learner on this model.

    Args:
        lengths: Tokens of a prompt and of an answer; those of the sizes by default.
        learner: Further keys of its section.
    """
    prompt_tokens, answer_tokens = lengths or (case.sizes.prompt_tokens, case.sizes.answer_tokens)
    values = {
        "name": "gpu",
        "model": {"path": str(model)},
        "data": {"prompts": "prompts.jsonl"},
        "reward": {"functions": [{"path": "reward.py"}]},
        "algorithm": {"prompt_length": prompt_tokens, "response_length": answer_tokens},
        "generation": {"dtype": "bfloat16"},
        "run": {"total_steps": 10},
        "learner": {"dtype": dtype, "micro_batch_tokens": 8 * (prompt_tokens + answer_tokens), **learner},
    }
    return parse_config(values, case.folder)


def random_rows(num_rollouts: int, prompt_tokens: int, answer_tokens: int) -> list[Row]:
    """Rollouts of random tokens, with log-probs of a flat distribution: the ratio is far from 1, the work the same."""
    lines = np.random.default_rng(0).integers(3, 90, (num_rollouts, prompt_tokens + answer_tokens)).tolist()
    flat = [-math.log(90.0)] * answer_tokens
    completions = [Completion(line[prompt_tokens:], flat, [0] * answer_tokens, "length") for line in lines]
    return rows_of([line[:prompt_tokens] for line in lines], completions)


@torch.no_grad()
def difference(
    case: PartRun, model: Path, dtype: str, prompts: Sequence[list[int]], completions: Sequence[Completion]
) -> LogprobDifference:
    """vLLM's log-probs against the learner's of the same tokens, packed as training packs them."""
    began = time.monotonic()
    config, device = learner_config(case, model, dtype), torch.device(case.device)
    policy = load_policy_model(model, config).to(device).eval()
    batch = StepBatch.from_rows(rows_of(prompts, completions))
    logp_BT = torch.zeros_like(batch.behavior_BT)
    packing = can_be_packed(policy.causal_lm)
    case.require(packing, "the learner's model does not keep packed rollouts apart")
    for cpu_micro in rank_micro_batches(
        batch, range(len(batch)), config.micro_batch_tokens, rank=0, num_ranks=1, packing=packing, backward=False
    ):
        micro = cpu_micro.to(device)
        logp_N, _ = policy(micro.input_RS, micro.line, micro.state_N, micro.target_N)
        logp_BT[micro.row_R, : micro.width] += micro.spread(logp_N).cpu()
    case.note(**{f"learner_{dtype}_s": time.monotonic() - began})
    delta_BT = torch.where(batch.mask_BT, batch.behavior_BT - logp_BT, 0.0).double()
    delta_N, mean_B = delta_BT[batch.mask_BT], delta_BT.sum(-1) / batch.mask_BT.sum(-1)
    return LogprobDifference(float(delta_N.std()), float(delta_N.abs().max()), float(delta_N.mean()), mean_B.numpy())
