"""The prompt order: every prompt once a pass, each pass its own order, the same again from the same seed.

And the tasks of several sources.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from gspo.common.config.loading import parse_config
from gspo.coordinator.data.prompts import training_prompts
from gspo.coordinator.groups.prompt_order import FixedOrder, PromptOrder
from gspo.coordinator.groups.tasks import TrainingTasks, evaluation_tasks, training_task
from gspo_proto.rollout_pb2 import GroupTask, Prompt


def places(order: PromptOrder, groups: range) -> list[int]:
    return [order.place(group) for group in groups]


def test_a_pass_has_every_prompt_once_and_the_next_pass_another_order() -> None:
    order = PromptOrder(50, seed=3, shuffle=True)
    first, second = places(order, range(50)), places(order, range(50, 100))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != list(range(50))


def test_the_order_follows_from_the_seed_alone() -> None:
    again = PromptOrder(50, seed=3, shuffle=True)
    other = PromptOrder(50, seed=4, shuffle=True)
    order = PromptOrder(50, seed=3, shuffle=True)
    backwards = [order.place(group) for group in reversed(range(200))]
    assert places(again, range(200)) == backwards[::-1]
    assert places(other, range(50)) != places(again, range(50))


def test_without_shuffling_the_file_is_repeated_as_it_is() -> None:
    order = PromptOrder(3, seed=0, shuffle=False)
    assert places(order, range(7)) == [0, 1, 2, 0, 1, 2, 0]


FUNCTION = {"builtin": "exact_match"}
RUN = {
    "name": "r",
    "seed": 5,
    "model": {"path": "m"},
    "reward": {"functions": [FUNCTION]},
    "sampling": {"stop": ["."]},
    "run": {"total_steps": 3},
}


def write(folder: Path, name: str, num_prompts: int) -> None:
    lines = [json.dumps({"prompt": f"{name} {number}", "answer": "a"}) for number in range(num_prompts)]
    (folder / f"{name}.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize(("epochs", "num_groups"), [(0.01, 1), (0.29, 29), (1.0, 100), (2.5, 250)])
def test_epochs_bound_the_groups_of_all_sources_together(epochs: float, num_groups: int) -> None:
    sources: list[dict[str, Any]] = [
        {"name": "a", "prompts": "a.jsonl", "weight": 3},
        {"name": "b", "prompts": "b.jsonl"},
    ]
    for data, lengths in (({"prompts": "a.jsonl"}, [100]), ({"sources": sources}, [40, 60])):
        config = parse_config({**RUN, "data": data, "run": {"total_epochs": epochs}}, Path("/c"))
        assert FixedOrder(config, lengths).num_groups == num_groups
    endless = parse_config({**RUN, "data": {"sources": sources}}, Path("/c"))
    assert FixedOrder(endless, [40, 60]).num_groups is None


def tasks_of(folder: Path, tokenizer: PreTrainedTokenizerFast, **data: Any) -> TrainingTasks:
    config = parse_config({**RUN, "data": data}, folder)
    return TrainingTasks(config, training_prompts(config, tokenizer))


async def taken(tasks: TrainingTasks, groups: range) -> list[GroupTask]:
    return list((await tasks.make(groups)).values())


async def test_each_source_has_the_order_of_a_run_of_it_alone(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    write(tmp_path, "a", 7)
    write(tmp_path, "b", 4)
    alone = {
        name: [task.prompt.text for task in await taken(tasks_of(tmp_path, tokenizer, prompts=f"{name}.jsonl"), groups)]
        for name, groups in (("a", range(30)), ("b", range(10)))
    }
    sources: list[dict[str, Any]] = [
        {"name": "a", "prompts": "a.jsonl", "weight": 3},
        {"name": "b", "prompts": "b.jsonl"},
    ]
    both = [task.prompt.text for task in await taken(tasks_of(tmp_path, tokenizer, sources=sources), range(40))]
    assert [text for text in both if text.startswith("a")] == alone["a"]
    assert [text for text in both if text.startswith("b")] == alone["b"]
    assert [text[0] for text in both[:8]] == list("aabaaaba")
    # A resumed run asks for groups in the middle alone.
    resumed = await taken(tasks_of(tmp_path, tokenizer, sources=sources), range(23, 40))
    assert [task.prompt.text for task in resumed] == both[23:]
    (listed,) = [{**sources[0], "weight": 2.5}]
    listed_alone = await taken(tasks_of(tmp_path, tokenizer, sources=[listed]), range(30))
    assert [task.prompt.text for task in listed_alone] == alone["a"]


def test_held_out_prompts_are_sampled_as_in_training_unless_evaluation_says_otherwise() -> None:
    held_out = {"prompts": "held_out.jsonl", "num_answers": 3}
    for own, expected in (({}, (0.7, 1.0)), ({"temperature": 0.5, "top_p": 0.75}, (0.5, 0.75))):
        keys = {"data": {"prompts": "a.jsonl"}, "sampling": {"temperature": 0.7}, "evaluation": {**held_out, **own}}
        config = parse_config({**RUN, **keys}, Path("/c"))
        source, prompt = config.sources[0], Prompt(text="a")
        sampled, greedy = evaluation_tasks(config, source, 0, prompt, label="v0", version=0)
        assert (sampled.sampling.temperature, sampled.sampling.top_p) == pytest.approx(expected)
        assert (sampled.num_rollouts, greedy.sampling.temperature) == (3, 0.0)
        trained = training_task(config, source, 0, prompt).sampling
        assert (trained.temperature, trained.top_p) == pytest.approx((0.7, 1.0))


async def test_each_task_has_the_reward_environment_and_sampling_of_its_source(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    write(tmp_path, "a", 3)
    write(tmp_path, "b", 3)
    environment = {"path": "env.py", "max_turns": 3, "weight": 2.0}
    own = {"functions": [], "environment": environment, "stop": [], "temperature": 0.7}
    sources = [{"name": "a", "prompts": "a.jsonl"}, {"name": "b", "prompts": "b.jsonl", **own}]
    first, second = await taken(tasks_of(tmp_path, tokenizer, sources=sources), range(2))
    assert ([use.name for use in first.rewards], first.environment) == (["exact_match"], "")
    assert (list(first.sampling.stop), first.sampling.temperature) == (["."], 1.0)
    assert [(use.name, use.weight) for use in second.rewards] == [("environment", 2.0)]
    assert (second.environment, second.play.max_turns, list(second.sampling.stop)) == ("env", 3, [])
    assert second.sampling.temperature == pytest.approx(0.7)


def test_training_keeps_the_sets_that_tokens_are_sampled_from_and_evaluation_samples_alike() -> None:
    sampling = {"top_k": 20, "top_p": 0.95, "min_p": 0.01}
    config = parse_config({**RUN, "data": {"prompts": "a.jsonl"}, "sampling": sampling}, Path("/c"))
    (source,), prompt = config.sources, Prompt(token_ids=[1])
    trained = training_task(config, source, 0, prompt)
    sampled, greedy = evaluation_tasks(config, source, 0, prompt, label="v0", version=0)
    for task in (trained, sampled, greedy):
        assert task.sampling.top_k == 20
        assert task.sampling.top_p == pytest.approx(0.95)
        assert task.sampling.min_p == pytest.approx(0.01)
    assert [task.sampling.keep_sets for task in (trained, sampled, greedy)] == [True, False, False]
    assert greedy.sampling.temperature == 0
