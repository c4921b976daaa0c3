"""The recipes under examples/recipes: each configuration is valid, and its functions score a right and a wrong answer.

tests/integration/run/test_recipe_runs.py trains two steps of each.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import time
from pathlib import Path

import pytest

from gspo.common.config.loading import read_config
from gspo.reward.functions.builtins.math_equivalence import compute_score

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.parent for path in ROOT.glob("examples/recipes/*/config.yaml"))
NEEDED_COLUMN = {"math_equivalence": "answer", "numeric": "answer", "code_tests": "tests"}


def prompts_of(recipe: Path) -> list[dict[str, object]]:
    """The rows of a recipe's prompts."""
    return [json.loads(line) for line in (recipe / "prompts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_recipe_is_whole(recipe: Path) -> None:
    config = read_config(recipe / "config.yaml")
    rows = prompts_of(recipe)
    assert rows
    for function in config.reward.functions:
        assert not function.path or (recipe / function.path).exists()
        assert all(NEEDED_COLUMN.get(function.builtin or "", "prompt") in row for row in rows)
    readme = (recipe / "README.md").read_text()
    assert f"gspo doctor examples/recipes/{recipe.name}\n" in readme or recipe.name == "resume_and_scale"
    assert f"gspo run examples/recipes/{recipe.name}\n" in readme
    assert f"(../examples/recipes/{recipe.name}/README.md)" in (ROOT / "docs/recipes.md").read_text()


def test_the_subjects_are_all_there() -> None:
    assert {path.name for path in RECIPES} == {
        "mathematics", "code", "tools", "mcp", "conversation", "judge", "lora", "moe", "long_answers",
        "resume_and_scale",
    }  # fmt: skip


def test_the_form_of_a_mathematical_answer_pays_for_one_box_at_the_end() -> None:
    reward = runpy.run_path(str(ROOT / "examples/recipes/mathematics/reward.py"))["reward"]
    answers = ["7 boxes.\n\\boxed{84}", "\\boxed{84}\nso it is", "\\boxed{1} or\n\\boxed{84}", "84", ""]
    assert reward([[{"role": "assistant", "content": text}] for text in answers]) == [1, 0, 0, 0, 0]


def test_the_answers_of_the_mathematical_prompts_are_read_by_the_verifier() -> None:
    for row in prompts_of(ROOT / "examples/recipes/mathematics"):
        assert compute_score(f"So \\boxed{{{row['answer']}}}", row["answer"]) == 1.0
        assert compute_score("So \\boxed{-999}", row["answer"]) == 0.0


def test_the_word_game_pays_for_an_early_right_guess() -> None:
    game = runpy.run_path(str(ROOT / "examples/recipes/conversation/word_game.py"))
    first, observation = game["reset"]({"word": "apple"})
    assert observation == ""
    state, observation, reward, done = game["step"](first, "angle")
    assert (observation, reward, done) == ("3 in place", 0.0, False)
    assert game["step"](state, "It is APPLE.")[1:] == ("right", pytest.approx(1 - 1 / 12), True)
    assert game["step"]({"word": "apple", "turns": 5}, "angle")[1:] == ("3 in place", pytest.approx(0.12), True)
    assert game["step"](first, "")[1:] == ("0 in place", 0.0, False)


def test_the_judge_s_limit_lets_a_minute_s_amount_through_and_delays_the_rest() -> None:
    limit_class = runpy.run_path(str(ROOT / "examples/recipes/judge/judge_server.py"))["MinuteLimit"]

    async def seconds() -> tuple[float, float]:
        limit = limit_class(600)  # ten a second
        start = time.monotonic()
        await asyncio.gather(*(limit.take(100) for _ in range(6)))
        full = time.monotonic()
        await asyncio.gather(limit.take(2), limit.take(2))
        return full - start, time.monotonic() - full

    at_once, delayed = asyncio.run(seconds())
    assert at_once < delayed
    assert delayed >= 0.35
