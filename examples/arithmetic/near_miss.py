"""Trains a small Qwen3 on near misses: most answers it sees are off by one or two.

Not reinforcement learning: it makes the policy that reinforcement learning starts from, one that mostly
answers wrong but holds a latent skill. Called by cold_start.py; data from problems.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from chat_tokenizer import END
from problems import EXACT_SHARE, MISSES, Problem, chat_prompt, near_miss
from small_model import Sizes, build_model, build_optimizers, predict, update
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerFast

# Index 0 is the exact sum: a row of `encode` is found at problem * len(OFFSETS) + offset index.
OFFSETS = (0, *MISSES)
IGNORE = -100


@dataclass(frozen=True)
class Schedule:
    """How long and how fast. At 400 steps the right answer is the likeliest to half of the problems, at 600 to 0.8 of
    them, and reinforcement learning from there takes half as many steps; sampled, 0.3 of the answers are right.
    """

    batch_size: int = 64
    matrix_learning_rate: float = 0.015
    num_steps: int = 600
    exact_share: float = EXACT_SHARE
    check_every: int = 50
    num_checked: int = 256


def build_arithmetic_model(
    tokenizer: PreTrainedTokenizerFast, num_experts: int = 0, *, scale: int = 1
) -> PreTrainedModel:
    """Two wide layers: they learn addition in fewer seconds than a deeper model of equal size."""
    widths = {"hidden_size": scale * 128, "intermediate_size": scale * 512}
    return build_model(tokenizer, Sizes(**widths, num_experts=num_experts, max_length=256, rope_theta=100.0))


def encode(tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]) -> tuple[Tensor, Tensor]:
    """(token_NT, label_NT), N = problems x OFFSETS; labels are IGNORE but on the answer and its end."""
    rows: list[tuple[list[int], list[int]]] = []
    for problem in problems:
        text = tokenizer.apply_chat_template(chat_prompt(problem), tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text)
        rows += [(prompt, tokenizer.encode(f"{near_miss(problem, miss)}{END}")) for miss in OFFSETS]
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    token_NT = torch.full((len(rows), width), tokenizer.pad_token_id)
    label_NT = torch.full((len(rows), width), IGNORE)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        token_NT[row, :end] = torch.tensor(prompt + answer)
        label_NT[row, len(prompt) : end] = torch.tensor(answer)
    return token_NT, label_NT


def answer_loss(model: PreTrainedModel, token_BT: Tensor, label_BT: Tensor) -> tuple[Tensor, Tensor | float]:
    """Negative log-probability of every label token [B, T - 1], 0 elsewhere; and the loss of unevenly used experts."""
    logits, imbalance = predict(model, token_BT)
    loss_BT = cross_entropy(logits[:, :-1].transpose(1, 2), label_BT[:, 1:], ignore_index=IGNORE, reduction="none")
    return loss_BT, imbalance


@torch.no_grad()
def exact_probability(model: PreTrainedModel, token_BT: Tensor, label_BT: Tensor) -> float:
    """Mean probability of the labelled answers: the accuracy of sampling at temperature 1, without noise."""
    return answer_loss(model, token_BT, label_BT)[0].sum(1).neg().exp().mean().item()


def draw_rows(problem_B: Tensor, exact_share: float, generator: torch.Generator) -> Tensor:
    """For each problem index the row of one teacher answer: exact in this share of cases, else a near miss."""
    exact_B = torch.rand(len(problem_B), generator=generator) < exact_share
    miss_B = torch.randint(1, len(OFFSETS), (len(problem_B),), generator=generator)
    return problem_B * len(OFFSETS) + torch.where(exact_B, 0, miss_B)


def train(
    model: PreTrainedModel,
    token_NT: Tensor,
    label_NT: Tensor,
    schedule: Schedule,
    seed: int,
    on_step: Callable[[int, float], None],
) -> float:
    """Trains in place; returns the mean probability of the exact answer, which `on_step` gets beside the step.

    It is measured on training problems only. Equal seed, threads and libraries give equal weights.
    """
    generator = torch.Generator().manual_seed(seed)
    num_problems = len(token_NT) // len(OFFSETS)
    checked = torch.arange(min(schedule.num_checked, num_problems)) * len(OFFSETS)
    optimizers = build_optimizers(model, schedule.matrix_learning_rate)
    probability, order = 0.0, torch.empty(0, dtype=torch.long)
    for step in range(1, schedule.num_steps + 1):
        if len(order) < schedule.batch_size:
            order = torch.randperm(num_problems, generator=generator)
        problem_B, order = order[: schedule.batch_size], order[schedule.batch_size :]
        rows = draw_rows(problem_B, schedule.exact_share, generator)
        label_BT = label_NT[rows]
        loss_BT, imbalance = answer_loss(model, token_NT[rows], label_BT)
        loss = loss_BT.sum() / (label_BT != IGNORE).sum() + imbalance
        update(model, optimizers, loss, step, schedule.num_steps)
        if step % schedule.check_every == 0:
            probability = exact_probability(model, token_NT[checked], label_NT[checked])
        on_step(step, probability)
    return probability
