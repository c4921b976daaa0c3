"""The section `environment`: its forms, its contradictions, and its part in a task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo.common.config.loading import parse_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.streams.entries import task_json
from gspo.coordinator.groups.tasks import evaluation_tasks, training_task
from gspo_proto.rollout_pb2 import Prompt

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def with_environment(minimal: dict[str, Any], **keys: Any) -> Config:
    return parse_config({**minimal, "environment": keys}, Path("/folder"))


def test_an_environment_of_ones_own(minimal: dict[str, Any]) -> None:
    config = with_environment(minimal, path="maze.py", reads=["maps"], tools=[LOOK])
    assert (config.environment.label, config.environment.path) == ("maze", Path("/folder/maze.py"))
    assert config.environment.reads == (Path("/folder/maps"),)
    assert config.environment.descriptions == [LOOK]


def test_an_environment_on_a_server(minimal: dict[str, Any]) -> None:
    keys = {"protocol": "openenv", "action_field": "text", "observation_field": "said", "ping_every_s": 5.0}
    config = with_environment(minimal, url="http://game.example:8000/a", reach_timeout_s=7.0, **keys)
    environment = config.environment
    assert (environment.label, environment.registered, environment.used) == ("game.example-8000", False, True)
    assert [spec.label for _, spec in config.sources[0].code()] == ["reward"], "the reward service loads no such code"
    assert with_environment(minimal, url="http://a:1", name="game").environment.label == "game"


def test_an_mcp_server(minimal: dict[str, Any]) -> None:
    mcp = {"command": ["python", "tools.py"], "reads": ["tools.py"], "tools": ["add"]}
    environment = with_environment(minimal, mcp=mcp, reach_timeout_s=7.0).environment
    assert (environment.label, environment.registered, environment.used) == ("mcp", False, True)
    assert environment.mcp.reads == (Path("/folder/tools.py"),)
    assert with_environment(minimal, mcp={"url": "http://a:1/mcp"}).environment.label == "a-1"
    assert environment.longest_step_s == environment.total_timeout_s, "each call has its own limit"
    del minimal["reward"]
    with pytest.raises(InputError, match="there is no environment or agent that rewards"):
        with_environment(minimal, mcp=mcp)


def test_a_paused_rollout_would_lose_its_session(minimal: dict[str, Any]) -> None:
    minimal["generation"] = {"segment_tokens": 512}
    for keys in ({"url": "http://a:1"}, {"mcp": {"command": ["a"]}}):
        with pytest.raises(InputError, match="their sessions on an environment's server end meanwhile") as error:
            with_environment(minimal, **keys)
        assert error.value.where == "generation.segment_tokens"


def test_one_name_is_one_environment(minimal: dict[str, Any]) -> None:
    first: dict[str, Any] = {"name": "a", "prompts": "p.jsonl", "functions": []}
    second = first | {"name": "b"}
    minimal["data"] = {"sources": [first, second]}
    del minimal["reward"]
    minimal["run"] = {"total_steps": 1}
    first["environment"] = {"url": "http://a:1", "name": "game", "max_turns": 3}
    for other in ({"url": "http://a:2", "name": "game"}, {"path": "game.py"}):
        second["environment"] = other
        with pytest.raises(InputError, match="'game' names two environments"):
            parse_config(minimal, Path())
    second["environment"] = {"url": "http://a:1", "name": "game", "max_turns": 4}
    assert [source.environment.max_turns for source in parse_config(minimal, Path()).sources] == [3, 4]


def test_it_may_be_all_that_rewards(minimal: dict[str, Any]) -> None:
    del minimal["reward"]
    assert with_environment(minimal, name="maze", version="0123abcd").environment.registered
    with pytest.raises(InputError, match="there is no environment or agent that rewards") as error:
        parse_config(minimal, Path())
    assert error.value.where == "reward.functions"


@pytest.mark.parametrize(
    ("keys", "where", "rule"),
    [
        ({"builtin": "tools"}, "environment.tools", "answers calls of built-in tools alone"),
        ({"builtin": "tools", "tools": ["calculater"]}, "environment.tools.0", "is not a built-in tool"),
        ({"builtin": "tools", "tools": ["python", "python"]}, "environment.tools.1", "'python' is there twice"),
        ({"path": "a.py", "tools": ["python"]}, "environment.tools", "an environment of yours answers its own"),
        ({"path": "a.py", "tools": [{"name": "look"}]}, "environment.tools.0", "does not describe a tool"),
        ({"path": "reward.py"}, "reward.functions.0.name", "'reward' is the environment's name"),
        ({"url": "a:1"}, "environment.url", "a:1 is not allowed"),
        ({"url": "http://b:c@a:1"}, "environment.url", "holds a password"),
        (
            {"url": "http://a:1", "protocol": "openenv", "tools": [LOOK]},
            "environment.tools",
            "beside protocol: openenv",
        ),
        ({"url": "http://a:1", "reach_timeout_s": 0}, "environment.reach_timeout_s", "greater than 0"),
        ({"mcp": {"url": "http://b:c@a:1"}}, "environment.mcp.url", "holds a password"),
        ({"mcp": {"command": ["a"], "tools": ["b", "b"]}}, "environment.mcp.tools.1", "b is there twice"),
    ],
)
def test_a_contradiction_names_its_key(minimal: dict[str, Any], keys: dict[str, Any], where: str, rule: str) -> None:
    with pytest.raises(InputError) as error:
        with_environment(minimal, **keys)
    assert error.value.where == where
    assert rule in error.value.rule
    assert error.value.fix


@pytest.mark.parametrize(
    ("mode", "same"),
    [("seq-mean-token-sum-turn-norm", "token-mean"), ("seq-mean-turn-mean-token-mean", "seq-mean-token-mean")],
)
def test_turns_divide_the_losses_of_conversations_alone(minimal: dict[str, Any], mode: str, same: str) -> None:
    minimal["algorithm"] = {"loss_agg_mode": mode}
    with pytest.raises(InputError) as error:
        parse_config(minimal, Path())
    assert error.value.where == "algorithm.loss_agg_mode"
    assert f"Set {same}, which is then the same" in error.value.fix
    minimal["environment"] = {"path": "game.py"}
    assert parse_config(minimal, Path()).algorithm.loss_agg_mode == mode


def test_a_task_carries_how_it_is_played(minimal: dict[str, Any]) -> None:
    config = with_environment(
        minimal, builtin="tools", tools=["calculator"], weight=0.5, max_turns=3, turn_tokens=9, long_turn="end"
    )
    for task in (
        training_task(config, config.sources[0], 7, Prompt(text="a")),
        *evaluation_tasks(config, config.sources[0], 0, Prompt(text="a"), label="v0", version=0),
    ):
        assert task.environment == "tools"
        play = task.play
        assert (play.max_turns, play.turn_tokens, play.end_long_turns) == (3, 9, True)
        assert (play.step_timeout_s, play.total_timeout_s, play.prompt_length) == (10.0, 300.0, 2048)
        assert [tool["function"]["name"] for tool in json.loads(play.tools_json)] == ["calculator"]
        assert [(use.name, use.weight) for use in task.rewards] == [("reward", 1.0), ("environment", 0.5)]


def test_a_task_without_an_environment_has_no_trace_of_one(minimal: dict[str, Any]) -> None:
    config = parse_config(minimal, Path())
    task = training_task(config, config.sources[0], 7, Prompt(text="a"))
    assert not task.environment
    assert not task.HasField("play")
    assert [use.name for use in task.rewards] == ["reward"]


def test_reset_receives_the_prompt_and_every_column() -> None:
    messages = [{"role": "user", "content": "Guess"}]
    prompt = Prompt(messages_json=json.dumps(messages), columns_json='{"number": 3}')
    assert json.loads(task_json(prompt)) == {"prompt": messages, "number": 3}
    assert json.loads(task_json(Prompt(text="Guess"))) == {"prompt": "Guess"}
