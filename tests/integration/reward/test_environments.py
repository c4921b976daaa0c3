"""The environment of a configuration: checked before a run, asked in a sandbox, a part of the score; and the tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gspo.common.config.reward import EnvironmentConfig, RewardConfig
from gspo.common.config.sources import Source
from gspo.common.errors import InputError
from gspo.reward.check import check
from gspo.reward.functions.environment_steps import EnvironmentSteps
from gspo.reward.functions.library import Function
from gspo.reward.scoring.scorer import Scorer, open_scorer
from gspo_proto.rollout_pb2 import Episode, RewardUse
from tests.support.reward_rollouts import make_rollout, reward_or_failure
from tests.support.service_process import make_run

LOOP = pytest.mark.asyncio(loop_scope="module")
GAME = "def reset(task): return {'n': task['answer']}, ''\ndef step(state, action): return state, 'no', 0.5, False\n"
STEP = "def step(state, action): return state, 'no', 0.5, False\n"


def check_game(folder: Path, source: str, **keys: Any) -> None:
    (folder / "game.py").write_text(source)
    check(make_run(folder, folder / "model", environment={"path": "game.py", **keys}))


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "def reset(task): return {}\n" + STEP,
            "reset of .*game.py.*: reset returned dict, not \\(.*\\). Correct it$",
        ),
        (
            "def reset(task): return task['anwser'], ''\n" + STEP,
            "KeyError.*give the data set the columns that it reads",
        ),
        (
            "import os\ndef reset(task): return os.urandom(4).hex(), ''\n" + STEP,
            "another state or observation the second",
        ),
        (
            "def reset(task): return {}, ''\ndef step(state, action): return state, 'no', '1', False",
            "step of .*game.py: step returned a .* not a number from -1e.*Correct it$",
        ),
        ("def reset(task): return {}, ''\ndef step(state, action): return stat, 'no', 1, False", "NameError"),
        ("def reset(task): return {}, ''\n", "is not an environment: the module has no step"),
        ("def reset(task) return", "environment.path: .*game.py, line 1"),
    ],
)
def test_an_environment_that_cannot_work_is_an_input_error(tmp_path: Path, source: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        check_game(tmp_path, source)


def test_a_good_one_passes_and_a_doubtful_one_is_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check_game(tmp_path, GAME)
    assert capfd.readouterr().err == ""
    check_game(tmp_path, GAME.replace("return state, 'no'", "return state, [][int(action)]"))
    assert "tried on the action '42', raised IndexError" in capfd.readouterr().err


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scorer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scorer]:
    """Tools as the environment, and one reward function."""
    (folder := tmp_path_factory.mktemp("tools") / "r.py").write_text(
        "def reward(completions): return [1.0] * len(completions)"
    )
    config = RewardConfig.model_validate({"functions": [{"path": folder}]})
    tools = EnvironmentConfig(builtin="tools", tools=("calculator", "python"), step_timeout_s=2.0, weight=0.5)
    async with open_scorer(
        config, name="reward-0", sources=[Source(functions=config.functions, environment=tools)]
    ) as scorer:
        yield scorer


@LOOP
async def test_the_steps_rewards_are_a_part_of_the_score(scorer: Scorer) -> None:
    good, failed, unreached = make_rollout("a"), make_rollout("b"), make_rollout("c")
    good.episode.CopyFrom(Episode(version="v1", reward=3.0))
    failed.episode.CopyFrom(Episode(version="v1", reward=3.0, failure_kind="timeout", failure="took longer"))
    unreached.episode.CopyFrom(Episode(failure_kind="unreachable", failure="nobody there"))
    scores = await scorer.score([good, failed, unreached])
    assert [reward_or_failure(score) for score in scores] == [
        2.5,
        "environment: took longer",
        "environment: nobody there",
    ]
    assert [(part.name, part.value, part.weight) for part in scores[0].parts] == [
        ("r", 1.0, 1.0),
        ("environment", 3.0, 0.5),
    ]
    assert scores[0].version.endswith(",v1")
    assert [score.failure_kind for score in scores] == ["", "timeout", "unreachable"]
    alone = make_rollout("d")
    alone.episode.reward = 0.25
    alone.rewards.append(RewardUse(name="environment", weight=1.0))
    assert [reward_or_failure(score) for score in await scorer.score([alone])] == [0.25]


async def answers(scorer: Scorer, *calls: tuple[str, Any]) -> list[str]:
    function: Function = await scorer.library.find("tools")
    keys = {"calculator": "expression", "python": "code"}
    asked = json.dumps([{"name": name, "arguments": {keys[name]: value}} for name, value in calls])
    turn = await EnvironmentSteps(None, session="run").step(function, "{}", "text", asked)
    assert (turn.reward, turn.done) == (0.0, False)
    return [message["content"] for message in json.loads(turn.observation_json)]


@LOOP
@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*34", "408"),
        ("-(1 + 2) ** 2 / 4", "-2.25"),
        ("7 // 2 % 2", "1"),
        ("1/0", "error: division by zero"),
        ("2 ** 99999", "error: the number is too large"),
        ("9 ** 9 ** 9", "error: the number is too large"),
        ("(-8) ** 0.5", "error: the result is not a real number"),
        ("__import__('os')", "error: only numbers, + - * / // % ** and brackets are known"),
        ("1 +", "error: invalid syntax"),
    ],
)
async def test_the_calculator(scorer: Scorer, expression: str, value: str) -> None:
    assert await answers(scorer, ("calculator", expression)) == [value]


@LOOP
async def test_python_prints_and_a_program_spoils_nothing(scorer: Scorer) -> None:
    spoils = "import json, builtins\njson.dumps = None\nbuiltins.str = None\nprint(6 * 7)"
    assert await answers(scorer, ("python", "print(6 * 7)\n1 / 0")) == ["42\nZeroDivisionError: division by zero"]
    (spoilt,) = await answers(scorer, ("python", spoils))
    assert "error" in spoilt or spoilt == "42"
    assert await answers(scorer, ("calculator", "1+1"), ("python", "x = 1")) == ["2", "(it printed nothing)"]
    (killed,) = await answers(scorer, ("python", "while True: pass"))
    assert killed == "error: took longer than 2 s and was killed"
    (long,) = await answers(scorer, ("python", "print('a' * 5000)"))
    assert long.endswith("a... (5001 characters)")


@LOOP
async def test_a_turn_without_a_call_is_the_last(scorer: Scorer) -> None:
    function = await scorer.library.find("tools")
    environments = EnvironmentSteps(None, session="run")
    turn = await environments.reset(function, '{"answer": "4"}')
    last = await environments.step(function, turn.state_json, "4", "[]")
    assert (turn.observation_json, last.observation_json, last.done) == ('""', '""', True)
