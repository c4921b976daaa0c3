"""Trains a small Qwen3 on near misses: most answers it sees are off by one or two.

Not reinforcement learning: it makes the policy that reinforcement learning starts from, one that mostly
answers wrong but holds a latent skill. Called by cold_start.py; data from problems.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from chat_tokenizer import END
from problems import EXACT_SHARE, MISSES, Problem, chat_prompt, near_miss
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

# Index 0 is the exact sum: a row of `encode` is found at problem * len(OFFSETS) + offset index.
OFFSETS = (0, *MISSES)
IGNORE = -100
# Keeps a router from sending every token to the same experts; far below the answers' loss.
BALANCE = 0.01


@dataclass(frozen=True)
class Schedule:
    """How long and how fast. At 400 steps the right answer is the likeliest to half of the problems, at 600 to 0.8 of
    them, and reinforcement learning from there takes half as many steps; sampled, 0.3 of the answers are right.
    """

    batch_size: int = 64
    matrix_learning_rate: float = 0.015  # Muon: a third of the steps that AdamW alone needs
    other_learning_rate: float = 3e-3  # AdamW, for embeddings and norms
    warmup_steps: int = 10
    num_steps: int = 600
    check_every: int = 50
    num_checked: int = 256


def build_model(tokenizer: PreTrainedTokenizerFast, num_experts: int = 0) -> PreTrainedModel:
    """A Qwen3 of two wide layers: it learns addition in fewer seconds than a deeper one of equal size.

    With `num_experts` a Qwen3-MoE of the same layers: two experts a token, together as wide as the dense layer.
    """
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},  # short prompts: a short wavelength
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if not num_experts:
        return Qwen3ForCausalLM(Qwen3Config(**sizes))
    experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, norm_topk_prob=True))


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
    """Negative log-probability of every label token [B, T - 1], 0 elsewhere; and how unevenly experts are used.

    Padding is on the right, so causal attention keeps it out without a mask.
    """
    has_experts = isinstance(model, Qwen3MoeForCausalLM)
    found = model(input_ids=token_BT, use_cache=False, **({"output_router_logits": True} if has_experts else {}))
    loss_BT = cross_entropy(
        found.logits[:, :-1].transpose(1, 2), label_BT[:, 1:], ignore_index=IGNORE, reduction="none"
    )
    return loss_BT, found.aux_loss if has_experts else 0.0


@torch.no_grad()
def exact_probability(model: PreTrainedModel, token_BT: Tensor, label_BT: Tensor) -> float:
    """Mean probability of the labelled answers: the accuracy of sampling at temperature 1, without noise."""
    return answer_loss(model, token_BT, label_BT)[0].sum(1).neg().exp().mean().item()


def draw_rows(problem_B: Tensor, generator: torch.Generator) -> Tensor:
    """For each problem index the row of one teacher answer: exact in EXACT_SHARE of cases, else a near miss."""
    exact_B = torch.rand(len(problem_B), generator=generator) < EXACT_SHARE
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
    optimizers = build_optimizers(model, schedule)
    probability, order = 0.0, torch.empty(0, dtype=torch.long)
    for step in range(1, schedule.num_steps + 1):
        if len(order) < schedule.batch_size:
            order = torch.randperm(num_problems, generator=generator)
        problem_B, order = order[: schedule.batch_size], order[schedule.batch_size :]
        rows = draw_rows(problem_B, generator)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * learning_rate_factor(schedule, step)
            optimizer.zero_grad()
        label_BT = label_NT[rows]
        loss_BT, imbalance = answer_loss(model, token_NT[rows], label_BT)
        loss = loss_BT.sum() / (label_BT != IGNORE).sum() + BALANCE * imbalance
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if step % schedule.check_every == 0:
            probability = exact_probability(model, token_NT[checked], label_NT[checked])
        on_step(step, probability)
    return probability


def build_optimizers(model: PreTrainedModel, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for all else, stacked experts and routers among it."""
    muon_ids = {id(p) for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name}
    muon_ids -= {id(p) for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")}
    matrices = [p for p in model.parameters() if id(p) in muon_ids]
    others = [p for p in model.parameters() if id(p) not in muon_ids]
    muon = [{"params": matrices, "initial_lr": schedule.matrix_learning_rate}]
    adamw = [{"params": others, "initial_lr": schedule.other_learning_rate}]
    return [
        torch.optim.Muon(muon, weight_decay=0.0),
        torch.optim.AdamW(adamw, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate_factor(schedule: Schedule, step: int) -> float:
    """Linear warm-up, then half a cosine down to a tenth at the last step."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / schedule.num_steps))
    return min(1.0, step / schedule.warmup_steps) * (0.1 + 0.9 * cosine)
