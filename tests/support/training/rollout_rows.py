"""Rollouts for tests of the trainer: random answers of unlike length, with log-probs near the model's own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from gspo.common.config.loading import parse_config
from gspo.common.config.schema import Config
from gspo.common.weights.manifest import policy_digest
from gspo.learner.assembly.row_metrics import row_metrics
from gspo.learner.assembly.rows import Row
from gspo.learner.training.trainer_api import TrainResult, configured_hyperparameters

if TYPE_CHECKING:
    from gspo.learner.training.trainer import Trainer

# DeepSpeed leaves what has fewer elements whole on every rank: without this every tensor of a tiny model.
SPREAD = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


def make_config(folder: Path, *, algorithm: dict[str, Any] | None = None, **sections: Any) -> Config:
    """A configuration of the learner; sections are laid over small defaults."""
    learner = sections.pop("learner", {})
    if learner.get("zero_stage") == 3:
        learner = {"deepspeed": SPREAD, **learner}
    given: dict[str, Any] = {
        "name": "test",
        "model": {"path": str(folder)},
        "data": {"prompts": "prompts.jsonl"},
        "reward": {"functions": [{"path": "reward.py"}]},
        "algorithm": {"prompt_length": 64, "response_length": 64, **(algorithm or {})},
        "run": {"total_steps": 10},
        "learner": {"learning_rate": 1e-3, "micro_batch_tokens": 256, "threads": 1, **learner},
        **sections,
    }
    return parse_config(given, base=folder)


def make_rows(folder: Path, **sizes: Any) -> list[Row]:
    """Rows in training order, by the arguments of `_make_rows`; every third answer has observation tokens in its
    middle, and some long ones have three branches. Behavior is the folder's model plus noise.

    The same rows are made once: a forward for each takes longer than training on them.
    """
    return [*_make_rows(folder, **sizes)]


@cache
def _make_rows(
    folder: Path,
    *,
    step: int = 1,
    num_groups: int = 8,
    num_rollouts: int = 4,
    num_mini_batches: int = 4,
    temperature: float = 1.0,
    noise: float = 0.01,
    longest: int = 40,
) -> tuple[Row, ...]:
    rng = np.random.default_rng(step)
    order = rng.permutation(num_groups * num_rollouts)
    answers = [_answer(rng, longest) for _ in order]
    prompts = [rng.integers(3, 90, rng.integers(3, 12)).astype(np.int32) for _ in range(num_groups)]
    rows = []
    for place, index in enumerate(order):
        group, number = divmod(int(index), num_rollouts)
        tokens, mask = answers[index]
        mask, branch_starts = _in_branches(mask) if index % 4 == 1 else (mask, [])
        rows.append(
            row_of(
                step=step,
                group=group,
                number=number,
                prompt_token_ids=prompts[group],
                token_ids=tokens,
                mask=mask,
                branch_starts=np.array(branch_starts, dtype=np.int32),
                version=np.where(mask, step - 1, -1).astype(np.int32),
                advantage=float(rng.normal()),
                reward=float(rng.integers(0, 2)),
                mini_batch=place * num_mini_batches // len(order),
                temperature=temperature,
            )
        )
    return tuple(with_behavior(folder, rows, temperature, noise, rng))


def train(trainer: Trainer, step: int, rows: Sequence[Row], not_applied: Collection[int] = ()) -> TrainResult:
    """A step with the configured hyperparameters, as the loop trains and reports it."""
    trained = trainer.train(step, rows, not_applied, configured_hyperparameters(trainer._config, step))
    return replace(trained, metrics={**row_metrics(rows, step), **trained.metrics})


def digest(trainer: Trainer) -> str:
    """The digest of a trainer's present policy."""
    weights = trainer.engine.policy()
    return policy_digest((name, str(w.dtype), tuple(w.shape), w.numpy()) for name, w in weights.items())


def with_version(rows: Sequence[Row], version: int) -> list[Row]:
    """The rows as another version sampled them."""
    return [replace(row, version=np.where(row.mask, version, -1).astype(np.int32)) for row in rows]


def with_behavior(
    folder: Path, rows: Sequence[Row], temperature: float, noise: float, rng: np.random.Generator
) -> list[Row]:
    """The rows with log-probs of the folder's model, plus noise, as a generator would report them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    scored = []
    for row in rows:
        with torch.inference_mode():
            logp = answer_logp(model, row, temperature).numpy()
        logp = logp + noise * rng.normal(size=len(row.token_ids))
        scored.append(replace(row, logp=np.where(row.mask, logp, 0).astype(np.float32)))
    return scored


def with_sets(folder: Path, rows: Sequence[Row], top_k: int, noise: float = 0.0) -> list[Row]:
    """The rows as a generator would report them that samples from `top_k` tokens: their ids, and log-probs over these.

    A token that is not among the likeliest takes the place of the last of them; every seventh set is a smaller one.
    """
    model, rng, cut = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), np.random.default_rng(7), []
    for row in rows:
        with torch.inference_mode():
            logp_TV = answer_logp_all(model, row, row.temperature)
        target_T1 = torch.as_tensor(row.token_ids).long()[:, None]
        id_TK = logp_TV.scatter(1, target_T1, torch.inf).topk(top_k).indices
        size_T = np.where(row.mask, np.where(np.arange(len(row.mask)) % 7 == 3, top_k // 2, top_k), 0)
        is_kept_TK = np.arange(top_k) < size_T[:, None]
        kept_TK = logp_TV.gather(1, id_TK).masked_fill(~torch.as_tensor(is_kept_TK), -torch.inf)
        noisy = torch.log_softmax(kept_TK, -1)[:, 0].numpy() + noise * rng.normal(size=len(size_T))
        kept_ids = id_TK.numpy()[is_kept_TK].astype(np.int32)
        logp = np.where(row.mask, noisy, 0).astype(np.float32)
        cut.append(replace(row, logp=logp, kept_sizes=size_T.astype(np.uint8), kept_ids=kept_ids))
    return cut


def set_logp(model: Any, row: Row) -> torch.Tensor:
    """Log-prob of each answer token over its set: a softmax of all logits, with those outside at minus infinity."""
    logp_TV = answer_logp_all(model, row, row.temperature)
    is_kept_TV = torch.zeros_like(logp_TV, dtype=torch.bool)
    place_N = torch.arange(len(row.kept_sizes)).repeat_interleave(torch.as_tensor(row.kept_sizes).long())
    is_kept_TV[place_N, torch.as_tensor(row.kept_ids).long()] = True
    is_kept_TV |= ~torch.as_tensor(row.mask)[:, None]
    target_T1 = torch.as_tensor(row.token_ids).long()[:, None]
    return torch.log_softmax(logp_TV.masked_fill(~is_kept_TV, -torch.inf), -1).gather(1, target_T1)[:, 0]


def answer_logp(model: Any, row: Row, temperature: float) -> torch.Tensor:
    """Log-prob of every answer token, from full logits of one branch alone; 0 for a branch's first token."""
    logp_TV = answer_logp_all(model, row, temperature)
    return logp_TV.gather(1, torch.as_tensor(row.token_ids).long()[:, None])[:, 0]


def answer_logp_all(model: Any, row: Row, temperature: float) -> torch.Tensor:
    """Log-probs of every token of the vocabulary at each answer token [T, V]; 0 for a branch's first token."""
    starts = [0, *row.branch_starts.tolist(), len(row.token_ids)]
    answer, logp = row.token_ids.tolist(), []
    for start, end in pairwise(starts):
        context = [] if start else row.prompt_token_ids.tolist()
        ids = torch.tensor([[*context, *answer[start:end]]])
        of_branch_TV = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / temperature, -1)
        before_TV = of_branch_TV[len(context) - 1 :] if context else torch.zeros_like(of_branch_TV[:1])
        logp += [before_TV] if context else [before_TV, of_branch_TV]
    return torch.cat(logp)


def _answer(rng: np.random.Generator, longest: int) -> tuple[Any, Any]:
    length = int(rng.integers(1, longest))
    mask = np.ones(length, dtype=np.bool_)
    if length > 6 and rng.random() < 0.3:
        mask[2:5] = False
    return rng.integers(3, 90, length).astype(np.int32), mask


def _in_branches(mask: Any) -> tuple[Any, list[int]]:
    """Three branches of a long answer, the further ones with two tokens of context: its mask, and where they begin."""
    starts = [len(mask) // 3, 2 * len(mask) // 3] if len(mask) > 11 else []
    for start in starts:
        mask[start : start + 2] = False
    return mask, starts


def row_of(**given: Any) -> Row:
    """A row with these columns, and nothing in the others."""
    blank: dict[str, Any] = {
        "attempt": 1,
        "prompt": "",
        "messages_json": "",
        "columns_json": "",
        "logp": np.zeros(0, dtype=np.float32),
        "text": "",
        "outcome": "eos",
        "stop": "",
        "failure": None,
        "parts_json": "[]",
        "reward_version": "",
        "skipped": None,
        "num_rollouts": 4,
        "generator": "",
        "scorer": "",
        "issued_unix_s": 0.0,
        "started_unix_s": 0.0,
        "finished_unix_s": 0.0,
        "scored_unix_s": 0.0,
    }
    return Row(**{**blank, **given})
