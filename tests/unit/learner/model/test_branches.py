"""Rollouts of several branches in a real model: no cut, order, packing, budget or rank changes loss and gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.teacher import TeacherConfig
from gspo.learner.assembly.rows import Row
from gspo.learner.model.attention import attend_to
from gspo.learner.model.batch import StepBatch, rank_micro_batches
from gspo.learner.model.network import PolicyModel, load_policy_model
from gspo.learner.objective.objective import Objective
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import answer_logp, make_config, row_of
from tests.support.typed.gradients import backward

# Every aggregation, and each kind of ratio. Rewards of rloo and grpo are given here, as advantages.
ALGORITHMS: list[dict[str, Any]] = [
    {"pg_clip": 0.05},
    {"pg_clip": 0.05, "importance_sampling": "seq_token", "loss_agg_mode": "seq-mean-token-sum"},
    {"pg_clip": 0.05, "pg_clip_reference_length": 3, "loss_agg_mode": "seq-mean-token-sum-turn-norm"},
    {"preset": "grpo", "pg_clip": 0.05},
    {"preset": "dr-grpo", "pg_clip": 0.05},
    {"objective": "cispo", "entropy_coef": 0.1},
    {"pg_clip": 0.05, "loss_agg_mode": "seq-mean-turn-mean-token-mean"},
]
OF_BRANCHES: list[dict[str, Any]] = [{**keys, "ratio_of": "branch"} for keys in ALGORITHMS if "preset" not in keys]
NOISE = 0.05
# An example takes a forward and a backward pass or two; a thousand of each would take half an hour.
EXAMPLES = settings(max_examples=min(200, settings().max_examples))


@dataclass(frozen=True)
class Spoken:
    """A branch: its context, and what follows, with the tokens of the policy in it."""

    context: tuple[int, ...]
    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]


token = st.integers(3, 89)


@st.composite
def spoken(draw: st.DrawFn, fewest: int = 1) -> Spoken:
    """A branch of any context; the policy wrote its last token."""
    context = draw(st.lists(token, min_size=1, max_size=6))
    token_ids = draw(st.lists(token, min_size=fewest, max_size=8))
    mask = [*draw(st.lists(st.booleans(), min_size=len(token_ids) - 1, max_size=len(token_ids) - 1)), True]
    return Spoken(tuple(context), tuple(token_ids), tuple(mask))


rollouts_of_branches = st.lists(st.lists(spoken(), min_size=1, max_size=4), min_size=1, max_size=5)


def row_from(branches: Sequence[Spoken], number: int) -> Row:
    """A rollout of these branches, the first one's context as its prompt."""
    first, *others = branches
    token_ids, mask, starts = list(first.token_ids), list(first.mask), []
    for branch in others:
        starts.append(len(token_ids))
        token_ids += [*branch.context, *branch.token_ids]
        mask += [*(False for _ in branch.context), *branch.mask]
    return row_of(
        step=1,
        group=number // 2,
        number=number % 2,
        prompt_token_ids=np.array(first.context, dtype=np.int32),
        token_ids=np.array(token_ids, dtype=np.int32),
        mask=np.array(mask),
        logp=np.zeros(len(mask), dtype=np.float32),
        version=np.where(mask, 0, -1).astype(np.int32),
        branch_starts=np.array(starts, dtype=np.int32),
        advantage=(-1.0) ** number * (1 + number / 3),
        reward=0.0,
        mini_batch=0,
        temperature=1.0,
        num_turns=1 + number % 3,
    )


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    torch.set_num_threads(1)
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("policy"), hidden_size=32, scale=4.0)
    return load_policy_model(folder, make_config(folder))


@torch.no_grad()
def with_logp(policy: PolicyModel, rows: Sequence[Row], noise: float) -> list[Row]:
    """The rows with the model's log-probs, each branch read alone, plus noise that the counted tokens have in order."""
    attend_to(None)
    rng, scored = np.random.default_rng(0), []
    for row in rows:
        logp = np.where(row.mask, answer_logp(policy.causal_lm, row, 1.0).numpy(), 0).astype(np.float32)
        logp[row.mask] += noise * rng.normal(size=row.mask.sum())
        scored.append(replace(row, logp=logp))
    return scored


def trained(
    policy: PolicyModel,
    rows: Sequence[Row],
    keys: dict[str, Any],
    *,
    packing: bool = True,
    max_tokens: int = 10_000,
    num_ranks: int = 1,
) -> torch.Tensor:
    """The gradient of one optimizer step and, at its end, the loss; the work of every rank, one after another."""
    algorithm = AlgorithmConfig.model_validate(keys)
    batch = StepBatch.from_rows(rows, by_branch=algorithm.ratio_of == "branch")
    objective = Objective(algorithm, TeacherConfig())
    targets = objective.targets(batch, {})
    sizes = targets.sizes(torch.ones(len(batch), dtype=torch.bool))
    policy.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for rank in range(num_ranks):
        for micro in rank_micro_batches(
            batch, range(len(batch)), max_tokens, rank=rank, num_ranks=num_ranks, packing=packing
        ):
            logp_N, entropy_N = policy(micro.input_RS, micro.line, micro.state_N, micro.target_N)
            part, _ = objective.loss(micro, micro.spread(logp_N), micro.spread(entropy_N), targets, sizes)
            backward(part)
            loss += part.detach()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.parameters()]
    return torch.cat([*(gradient.flatten() for gradient in gradients), loss[None].float()])


def assert_same(vector: torch.Tensor, expected: torch.Tensor) -> None:
    assert (vector - expected).norm() < 1e-4 * expected.norm() + 1e-6


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[Spoken], list[list[Spoken]]]:
    """Conversations, each as one branch, and cut into branches whose contexts repeat all that was said before."""
    whole, cut = [], []
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(token, min_size=1, max_size=4))
        turns = [draw(spoken()) for _ in range(draw(st.integers(1, 4)))]
        history: list[int] = []
        mask: list[bool] = []
        branches: list[Spoken] = []
        for turn in turns:
            if not branches or draw(st.booleans()):
                branches.append(Spoken((*prompt, *history), (), ()))
            last = branches[-1]
            written = (*turn.context, *turn.token_ids)
            is_policy = (*(False for _ in turn.context), *turn.mask)
            branches[-1] = Spoken(last.context, (*last.token_ids, *written), (*last.mask, *is_policy))
            history += written
            mask += is_policy
        whole.append(Spoken(tuple(prompt), tuple(history), tuple(mask)))
        cut.append(branches)
    return whole, cut


@pytest.mark.parametrize("keys", ALGORITHMS, ids=str)
@EXAMPLES
@given(conversations(), st.booleans())
def test_a_conversation_is_trained_alike_however_it_is_cut(
    policy: PolicyModel, keys: dict[str, Any], talked: tuple[list[Spoken], list[list[Spoken]]], packing: bool
) -> None:
    """Also with the log-probs of each branch read alone, which are then those of the whole."""
    whole, cut = talked
    rows = with_logp(policy, [row_from([branch], number) for number, branch in enumerate(whole)], NOISE)
    in_branches = with_logp(policy, [row_from(branches, number) for number, branches in enumerate(cut)], NOISE)
    for row, branched in zip(rows, in_branches, strict=True):
        np.testing.assert_allclose(branched.logp[branched.mask], row.logp[row.mask], atol=1e-4)
        assert len(branched.token_ids) >= len(row.token_ids)
    assert_same(trained(policy, in_branches, keys, packing=packing), trained(policy, rows, keys))


@pytest.mark.parametrize("keys", [*ALGORITHMS, *OF_BRANCHES], ids=str)
@EXAMPLES
@given(rollouts_of_branches, st.booleans(), st.integers(1, 3), st.data())
def test_packing_budget_and_ranks_change_nothing(
    policy: PolicyModel,
    keys: dict[str, Any],
    rollouts: list[list[Spoken]],
    packing: bool,
    num_ranks: int,
    data: st.DataObject,
) -> None:
    rows = with_logp(policy, [row_from(branches, number) for number, branches in enumerate(rollouts)], NOISE)
    longest = max(len(row.prompt_token_ids) + len(row.token_ids) for row in rows)
    max_tokens = data.draw(st.integers(longest, 3 * longest))
    vector = trained(policy, rows, keys, packing=packing, max_tokens=max_tokens, num_ranks=num_ranks)
    assert_same(vector, trained(policy, rows, keys, packing=False))


@pytest.mark.parametrize("keys", [*ALGORITHMS, *OF_BRANCHES], ids=str)
@EXAMPLES
@given(rollouts_of_branches, st.randoms(use_true_random=False))
def test_the_order_of_branches_changes_nothing(
    policy: PolicyModel, keys: dict[str, Any], rollouts: list[list[Spoken]], random: Any
) -> None:
    rows = with_logp(policy, [row_from(branches, number) for number, branches in enumerate(rollouts)], 0.0)
    mixed = [random.sample(branches, len(branches)) for branches in rollouts]
    others = with_logp(policy, [row_from(branches, number) for number, branches in enumerate(mixed)], 0.0)
    # An engine that is further off the longer the context, so that ratios differ and go with their tokens.
    moved, also = ([replace(row, logp=row.logp + off(row)) for row in each] for each in (rows, others))
    assert_same(trained(policy, also, keys), trained(policy, moved, keys))


def off(row: Row) -> Any:
    """For each policy token a difference that follows from the token alone."""
    return np.where(row.mask, NOISE * np.sin(row.token_ids), 0).astype(np.float32)


@pytest.mark.parametrize("keys", [{}, {"ratio_of": "branch"}], ids=str)
@EXAMPLES
@given(rollouts_of_branches)
def test_a_rollout_weighs_as_one(policy: PolicyModel, keys: dict[str, Any], rollouts: list[list[Spoken]]) -> None:
    """At ratios of 1 its loss is its advantage, with any number and length of branches."""
    rows = with_logp(policy, [row_from(branches, number) for number, branches in enumerate(rollouts)], 0.0)
    loss = float(trained(policy, rows, keys)[-1])
    advantages = [row.advantage for row in rows if row.advantage is not None]
    assert loss == pytest.approx(-sum(advantages) / len(rows), abs=1e-4)


@EXAMPLES
@given(st.lists(spoken(fewest=3), min_size=2, max_size=4))
def test_every_branch_is_read_alone_and_from_its_first_position(policy: PolicyModel, branches: list[Spoken]) -> None:
    """Against the same branches as rollouts of their own."""
    row, *alone = (row_from(each, number) for number, each in enumerate([branches, *([branch] for branch in branches)]))
    figures = []
    for rows in ([row], alone):
        batch = StepBatch.from_rows(rows)
        for packing in (True, False):
            (micro,) = rank_micro_batches(batch, range(len(batch)), 10_000, rank=0, num_ranks=1, packing=packing)
            with torch.no_grad():
                logp_N, _ = policy(micro.input_RS, micro.line, micro.state_N, micro.target_N)
            logp_BT = torch.zeros_like(batch.behavior_BT)
            logp_BT[micro.row_R, : micro.width] = micro.spread(logp_N)
            figures.append(logp_BT[batch.mask_BT])
    for logp_N in figures[1:]:
        torch.testing.assert_close(logp_N, figures[0], rtol=1e-4, atol=1e-4)
    assert [len(each) for each in StepBatch.from_rows([row]).branches] == [len(branches)]


def test_a_branch_without_counted_tokens_is_not_read() -> None:
    """Tokens too old left its mask; the first branch may be such a one too."""
    row = row_from([Spoken((5,), (6, 7), (True, True)), Spoken((8, 9), (10, 11), (True, True))], 0)
    first, second = np.array([True, True, False, False, False, False]), np.array([False] * 4 + [True, True])
    batch = StepBatch.from_rows([replace(row, mask=first), replace(row, mask=second), row])
    assert [token_S.tolist() for token_S in batch.sequences] == [[5, 6], [8, 9, 10], [5, 6, 8, 9, 10]]
    assert batch.branches == (((0, 2, 2),), ((1, 3, 2),), ((0, 2, 2), (1, 3, 2)))
    assert [state_N.tolist() for state_N in batch.states] == [[0, 1], [1, 2], [0, 1, 3, 4]]


def test_a_branch_without_a_context_is_refused() -> None:
    row = row_from([Spoken((5,), (6,), (True,)), Spoken((8,), (10,), (True,))], 3)
    with pytest.raises(ValueError, match="rollout 1-1: branch 1 begins with a token of the policy"):
        StepBatch.from_rows([replace(row, mask=np.array([True, True, True]))])
