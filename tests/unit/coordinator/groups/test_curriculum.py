"""The prompts of a curriculum: bounds of the visits, and the same draws from the same log wherever a run was killed."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from transformers import PreTrainedTokenizerFast

from gspo.common.config.loading import parse_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.coordinator.data.prompts import training_prompts
from gspo.coordinator.groups.curriculum import Curriculum, SourceVisits
from gspo.coordinator.groups.prompt_order import FixedOrder, PromptOrder, PromptPlace
from gspo.coordinator.groups.slots import OpenGroup, Slots

BATCH_SIZE, MAX_LAG = 3, 1
LENGTHS = (11, 5)


def read(seed: int = 0, folder: Path = Path()) -> Config:
    """Two sources, of which the first has two thirds of the groups."""
    sources = [{"name": name, "prompts": f"{name}.jsonl", "weight": weight} for name, weight in (("a", 2), ("b", 1))]
    keys: dict[str, Any] = {
        "name": "r",
        "seed": seed,
        "model": {"path": "m"},
        "data": {"sources": sources, "curriculum": "spread", "revisit_passes": 3},
        "reward": {"functions": [{"builtin": "exact_match"}]},
        "algorithm": {"rollout_batch_size": BATCH_SIZE},
        "staleness": {"max_lag": MAX_LAG},
        "run": {"total_steps": 3},
    }
    return parse_config(keys, folder)


@settings(max_examples=60, deadline=None)
@given(
    num_prompts=st.integers(1, 20),
    revisit_passes=st.integers(2, 6),
    seed=st.integers(0, 2**31 - 1),
    results=st.randoms(use_true_random=False),
    share=st.sampled_from((0.0, 0.3, 1.0)),
)
def test_every_prompt_is_visited_once_a_pass_at_most_and_once_in_so_many_passes_at_least(
    num_prompts: int, revisit_passes: int, seed: int, results: random.Random, share: float
) -> None:
    order = PromptOrder(num_prompts, seed=seed, shuffle=True)
    visits = SourceVisits(order, num_prompts, seed=seed, revisit_passes=revisit_passes)
    by_pass: Counter[tuple[int, int]] = Counter()
    last = 4 * revisit_passes
    while visits.walked < last * num_prompts:
        place = visits.draw()
        assert place == order.place(visits.walked - 1)
        by_pass[(visits.walked - 1) // num_prompts, place] += 1
        visits.learn(place, differ=results.random() < share)
    assert set(by_pass.values()) == {1}
    for first in range(last - revisit_passes + 1):
        window = {place for number, place in by_pass if first <= number < first + revisit_passes}
        assert window == set(range(num_prompts))
    # The owned passes are even: none has more than its part of prompts that all had equal rewards.
    for number in range(1, last if share == 0.0 else 0):
        size = sum(of_pass == number for of_pass, _ in by_pass)
        assert size in (num_prompts // revisit_passes, -(-num_prompts // revisit_passes))


def test_a_prompt_sits_out_after_equal_rewards_and_comes_back_after_different_ones() -> None:
    order = PromptOrder(4, seed=1, shuffle=False)
    visits = SourceVisits(order, 4, seed=1, revisit_passes=2)
    assert [visits.draw() for _ in range(4)] == [0, 1, 2, 3]
    for place, differ in enumerate((False, True, False, True)):
        visits.learn(place, differ=differ)
    assert visits.num_equal == 2
    # Two passes: those with different rewards in both, the others in one.
    drawn = Counter(visits.draw() for _ in range(6))
    assert drawn == {0: 1, 1: 2, 2: 1, 3: 2}
    visits.learn(0, differ=True)
    visits.learn(1, differ=False)
    visits.learn(1, differ=False)
    assert visits.num_equal == 2
    assert Counter(visits.draw() for _ in range(6)) == {0: 2, 1: 1, 2: 1, 3: 2}


def test_the_first_passes_are_those_without_a_curriculum() -> None:
    """Nothing is known before the first results count, and a source without equal rewards is never thinned."""
    config = read()
    curriculum, fixed = Curriculum(config, LENGTHS), FixedOrder(config, LENGTHS)
    curriculum.learn([(group, True) for group in range(91)])
    assert [curriculum.place(g) for g in range(100)] == [fixed.place(g) for g in range(100)]


def test_a_group_without_a_score_says_nothing_about_its_prompt() -> None:
    config = read()
    curriculum = Curriculum(config, LENGTHS)
    curriculum.learn([(group, None) for group in range(91)])
    assert [curriculum.place(g) for g in range(100)] == [FixedOrder(config, LENGTHS).place(g) for g in range(100)]
    assert [row["equal"] for row in curriculum.describe()] == [0, 0]


def test_results_decide_about_a_group_no_earlier_than_they_must_be_there() -> None:
    """One order knows the whole log from the start, the other each result when a group needs it."""
    log: list[tuple[int, bool | None]] = [(group, group % 3 == 0) for group in range(200)]
    early, late = Curriculum(read(), LENGTHS), Curriculum(read(), LENGTHS)
    early.learn(log)
    for group in range(200):
        late.learn(log[late.num_results : late.needs(group)])
        assert early.place(group) == late.place(group)
    # Six slots and a batch of three: the first result decides about the tenth group.
    assert [late.needs(group) for group in (0, 8, 9, 10)] == [0, 0, 1, 2]


class CurriculumMachine(RuleBasedStateMachine):
    """A coordinator that issues, is killed and reads the log late; a learner that settles groups in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.config = read(seed=5)
        self.slots = Slots(self.config.num_slots, BATCH_SIZE)
        self.order = Curriculum(self.config, LENGTHS)
        self.log: list[tuple[int, bool | None]] = []
        self.prompts: dict[int, PromptPlace] = {}
        self.draws = 0

    def prompt_of(self, group: int) -> PromptPlace:
        """The prompt of a group, after the results that it needs and no more have come."""
        needed = self.order.needs(group)
        assert needed <= len(self.log), "the draw would wait for results that may never come"
        self.order.learn(self.log[self.order.num_results : needed])
        return self.order.place(group)

    @rule(count=st.integers(1, 2 * BATCH_SIZE))
    def issue(self, count: int) -> None:
        for group in self.slots.upcoming(min(count, self.slots.num_free)):
            prompt = self.prompt_of(group)
            assert self.prompts.setdefault(group, prompt) == prompt
            self.slots.open[group] = OpenGroup(1, 0.0, 1.0, 0)

    @rule()
    def read_ahead(self) -> None:
        for group in self.slots.upcoming(BATCH_SIZE):
            prompt = self.prompt_of(group)
            assert self.prompts.setdefault(group, prompt) == prompt

    @precondition(lambda self: self.slots.open)
    @rule(data=st.data(), differ=st.sampled_from((True, False, False, None)))
    def settle(self, data: st.DataObject, differ: bool | None) -> None:
        group = data.draw(st.sampled_from(sorted(self.slots.open)))
        self.log.append((group, differ))
        self.slots.settle([group], "trained")

    @rule(extra=st.integers(0, 50))
    def restart(self, extra: int) -> None:
        """Another process knows the whole log, or a part of it, and draws the same for every group so far."""
        self.order = Curriculum(self.config, LENGTHS)
        self.order.learn(self.log[:extra])
        for group, prompt in self.prompts.items():
            assert self.prompt_of(group) == prompt

    @rule()
    def replay(self) -> None:
        """The same seed and log make the same order, another seed another one."""
        again = Curriculum(self.config, LENGTHS)
        again.learn(self.log)
        assert all(again.place(group) == prompt for group, prompt in self.prompts.items())


TestCurriculum = CurriculumMachine.TestCase
TestCurriculum.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)


def test_another_seed_has_another_order() -> None:
    drawn = []
    for seed in (0, 1):
        curriculum = Curriculum(read(seed=seed), LENGTHS)
        curriculum.learn([(group, group % 3 == 0) for group in range(91)])
        drawn.append([curriculum.place(group) for group in range(100)])
    assert drawn[0] != drawn[1]


def test_prompts_whose_rewards_differ_take_most_of_the_groups() -> None:
    """Three of the first source's eleven prompts have spread. With three passes to a revisit, 3 + 8/3 a pass."""
    curriculum = Curriculum(read(), LENGTHS)
    useful = {0, 4, 7}
    visits: Counter[bool] = Counter()
    for group in range(3000):
        source, place = curriculum.place(group)
        curriculum.learn([(group, source == 0 and place in useful)])
        if source == 0 and group > 100:
            visits[place in useful] += 1
    assert visits[True] / visits.total() == pytest.approx(3 / (3 + 8 / 3), abs=0.01)


@pytest.mark.parametrize(("num_prompts", "is_enough"), [(2, True), (1, False)])
def test_a_source_with_fewer_prompts_than_its_groups_in_a_step_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, num_prompts: int, is_enough: bool
) -> None:
    """The first source has two of three groups in a step."""
    for name, count in (("a", num_prompts), ("b", 1)):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1+1="}\n' * count)
    config = read(folder=tmp_path)
    if is_enough:
        assert [len(own) for own in training_prompts(config, tokenizer)] == [2, 1]
        return
    with pytest.raises(InputError, match=r"^data.sources.0.prompts: has 1 usable prompts, and a step takes 2 groups"):
        training_prompts(config, tokenizer)
