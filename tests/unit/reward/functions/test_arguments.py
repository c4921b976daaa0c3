"""The calling conventions: the function of a file that is called, and its arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gspo.common.config.reward import EnvironmentConfig, RewardFunction
from gspo.common.config.sources import Source, code_of
from gspo.common.errors import InputError
from gspo.reward.functions.arguments import MissingColumnError, arguments_for, check_args, check_columns
from gspo.reward.functions.configured import open_function, read_code
from gspo.reward.functions.library import Library
from gspo.reward.sandbox.calls import CallLimits, Signature
from gspo.reward.sandbox.execution import Sandbox
from gspo.reward.sandbox.inside.recognise import UnfitError, find_function
from gspo.reward.sandbox.inside.worker import load_module
from gspo.reward.sandbox.launch import ConfinementLevel
from gspo_proto.rollout_pb2 import OUTCOME_EOS, OUTCOME_STOP_STRING, OUTCOME_TRUNCATED, Prompt, Rollout


def find(source: str, entry: str | None = None) -> dict[str, Any]:
    return find_function(load_module("/nowhere/answers.py", source, []), entry)[1]


def signature(source: str, entry: str | None = None) -> Signature:
    return msgspec.convert(find(source, entry), Signature)


def rollout(text: str = "4", *, messages: list[dict[str, str]] | None = None, **columns: Any) -> Rollout:
    prompt = Prompt(
        text="2+2=", messages_json=json.dumps(messages) if messages else "", columns_json=json.dumps(columns)
    )
    return Rollout(prompt=prompt, text=text, token_ids=[7, 8], outcome=OUTCOME_EOS)


def test_an_environment_has_its_own_memory_and_time() -> None:
    environment = EnvironmentConfig(builtin="tools", tools=("calculator",), memory_mb=512, step_timeout_s=3.0)
    limits = CallLimits(timeout_s=9.0, memory_mb=2048, cpu_s=1.0)
    library = Library(limits, confinement=ConfinementLevel("rlimits"))
    function = open_function(environment, "environment", library)
    assert isinstance(function.callee, Sandbox)
    assert function.callee.limits == CallLimits(timeout_s=3.0, memory_mb=512, cpu_s=1.0)


@pytest.mark.parametrize(
    ("source", "entry", "name", "convention"),
    [
        ("def reward(prompts, completions, **columns): ...", None, "reward", "trl"),
        ("def is_short(completions, **kwargs): ...", None, "is_short", "trl"),
        ("def longer(completion_ids, **kwargs): ...", None, "longer", "trl"),
        ("async def reward(completions, answer): ...", None, "reward", "trl"),
        ("def a(completions): ...\ndef b(completions): ...", "b", "b", "trl"),
        ("def near(completions): ...\ndef reward(completions): ...", None, "reward", "trl"),
        ("def _hidden(completions): ...\ndef shown(completions): ...", None, "shown", "trl"),
        ("def text_of(c): ...\ndef near(completions): ...", None, "near", "trl"),
        (
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...",
            None,
            "compute_score",
            "verl",
        ),
        ("def check(solution_str, ground_truth): ...", None, "check", "verl"),
        (
            "def compute_score(data_sources, solution_strs, ground_truths, extra_infos): ...",
            None,
            "compute_score",
            "verl_batch",
        ),
        ("def reward(*args, **kwargs): ...", None, "reward", "trl"),
        ("class Near:\n  def __call__(self, completions): ...\nreward = Near()", None, "reward", "trl"),
    ],
)
def test_the_function_of_a_file_is_recognised(source: str, entry: str | None, name: str, convention: str) -> None:
    description = find(source, entry)
    assert (description["entry"], description["convention"]) == (name, convention)


@pytest.mark.parametrize(
    ("source", "entry", "why"),
    [
        ("def score(text): ...", None, "holds no reward function; it defines score"),
        ("import math", None, "holds no reward function; it defines no function"),
        (
            "class Exact:\n  def __call__(self, completions): ...",
            None,
            "an object of its class Exact can be called: reward = Exact()",
        ),
        ("def f(solution_string, x): ...", None, "it defines f; did you mean 'solution_str' by 'solution_string'"),
        ("def reset(task): ...\ndef step(state, action): ...", None, r"as an environment does \(kind: environment\)"),
        ("def reward(completion): ...", None, r"which is neither .*; did you mean 'completions' by 'completion'"),
        ("def a(completions): ...\ndef b(completions): ...", None, "holds several reward functions: a, b"),
        ("def a(completions): ...", "b", "has no function 'b'; it defines a"),
        ("def reward(texts): ...", None, r"defines reward\(texts\), which is neither"),
        ("def reward(completions, /): ...", None, "positional-only"),
        ("from functools import reduce", None, "it defines no function"),
    ],
)
def test_a_file_without_a_function_to_call_says_what_it_holds(source: str, entry: str | None, why: str) -> None:
    with pytest.raises(UnfitError, match=why):
        find(source, entry)


def test_columns_go_by_name_only_where_they_are_asked_for() -> None:
    rows = [rollout("4", answer="4", level=1), rollout("5", answer="4", level=2)]
    by_name = arguments_for(signature("def reward(completions, answer): ..."), rows)
    assert by_name == {"arguments": {"completions": ["4", "5"], "answer": ["4", "4"]}}
    every = arguments_for(signature("def reward(prompts, completions, **columns): ..."), rows)
    assert every["arguments"] == {
        "prompts": ["2+2=", "2+2="],
        "completions": ["4", "5"],
        "answer": ["4", "4"],
        "level": [1, 2],
    }


def test_how_an_answer_ended_is_given_where_it_is_asked_for() -> None:
    cut, stopped = rollout(), rollout()
    cut.outcome = OUTCOME_TRUNCATED
    stopped.outcome, stopped.stop = OUTCOME_STOP_STRING, "\n"
    asked = signature("def reward(completion_ids, outcomes, stops, truncated): ...")
    assert arguments_for(asked, [cut, stopped])["arguments"] == {
        "completion_ids": [[7, 8], [7, 8]],
        "outcomes": ["truncated", "stop_string"],
        "stops": ["", "\n"],
        "truncated": [True, False],
    }


def test_arguments_that_the_process_makes_are_named() -> None:
    first, second = rollout(answer="4"), rollout("5", answer="4")
    second.version[:], second.token_ids[:] = [2, -1, 3], []
    source = "def reward(completions, log_metric, log_extra=None, trainer_state=None, raw_completions=None): ..."
    question = arguments_for(signature(source), [first, second])
    assert question["arguments"] == {"completions": ["4", "5"]}
    supplied = {"log_metric": None, "log_extra": None, "trainer_state": 3, "raw_completions": [[7, 8], "5"]}
    assert question["supplied"] == supplied
    # A column or an argument of the configuration goes before.
    asked = signature("def reward(completions, tokenizer): ...")
    assert "supplied" not in arguments_for(asked, [rollout(tokenizer="a")])
    assert "supplied" not in arguments_for(asked, [first], {"tokenizer": "a"})


def test_a_conversation_is_given_as_messages() -> None:
    asked = [{"role": "user", "content": "2+2="}]
    question = arguments_for(signature("def reward(prompts, completions): ..."), [rollout(messages=asked)])
    assert question["arguments"] == {
        "prompts": [asked],
        "completions": [[{"role": "assistant", "content": "4"}]],
    }


def test_an_answer_has_what_its_prompt_had_of_it() -> None:
    asked = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "It is "}]
    question = arguments_for(signature("def reward(prompts, completions): ..."), [rollout(messages=asked)])
    assert question["arguments"] == {
        "prompts": [asked[:1]],
        "completions": [[{"role": "assistant", "content": "It is 4"}]],
    }


def test_a_missing_column_is_named_unless_it_has_a_default() -> None:
    rows = [rollout(answer="4")]
    with pytest.raises(MissingColumnError, match="'level'"):
        arguments_for(signature("def reward(completions, level): ..."), rows)
    assert "level" not in arguments_for(signature("def reward(completions, level=1): ..."), rows)["arguments"]


@pytest.mark.parametrize(
    ("columns", "truth"),
    [
        ({"ground_truth": "a", "reward_model": {"ground_truth": "b"}, "answer": "c"}, "a"),
        ({"reward_model": {"ground_truth": "b", "style": "rule"}, "answer": "c"}, "b"),
        ({"answer": "c"}, "c"),
    ],
)
def test_verl_finds_the_right_answer_in_order(columns: dict[str, Any], truth: str) -> None:
    verl = signature("def compute_score(data_source, solution_str, ground_truth, extra_info): ...")
    assert arguments_for(verl, [rollout(**columns)]) == {
        "rows": [{"data_source": "", "solution_str": "4", "ground_truth": truth, "extra_info": {}}]
    }


def test_verl_gets_its_columns_and_others_by_name() -> None:
    verl = signature("def compute_score(data_source, solution_str, ground_truth, extra_info, level): ...")
    (row,) = arguments_for(verl, [rollout(answer="4", data_source="sums", extra_info={"i": 1}, level=3, other=0)])[
        "rows"
    ]
    assert (row["data_source"], row["extra_info"], row["level"], "other" in row) == ("sums", {"i": 1}, 3, False)
    with pytest.raises(MissingColumnError, match="ground_truth"):
        arguments_for(signature("def compute_score(solution_str, ground_truth): ..."), [rollout(level=3)])


def test_verls_batch_form_gets_lists() -> None:
    source = "def compute_score(data_sources, solution_strs, ground_truths, extra_infos, level): ..."
    rows = [rollout(answer="4", level=3), rollout("5", answer="6", level=4, extra_info={"i": 1}, data_source="sums")]
    assert arguments_for(signature(source), rows)["arguments"] == {
        "data_sources": ["", "sums"],
        "solution_strs": ["4", "5"],
        "ground_truths": ["4", "6"],
        "extra_infos": [{}, {"i": 1}],
        "level": [3, 4],
    }
    with pytest.raises(MissingColumnError, match="ground_truth"):
        arguments_for(signature(source), [rollout(level=3)])


def test_the_version_is_the_hash_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text("")
    code = read_code(RewardFunction(path=file), "reward.functions.0")
    assert code.version == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert code.name == "r"


def test_a_file_that_cannot_be_used_is_an_input_error(tmp_path: Path) -> None:
    broken, binary = tmp_path / "broken.py", tmp_path / "binary.py"
    broken.write_text("def reward(completions):\n    return [1.0\n")
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"broken.py, line 2, column 12: '\[' was never closed"):
        read_code(RewardFunction(path=broken), "reward.functions.0")
    with pytest.raises(InputError, match=r"binary.py: invalid or missing encoding"):
        read_code(RewardFunction(path=binary), "reward.functions.0")
    with pytest.raises(InputError, match="No such file"):
        read_code(RewardFunction(path=tmp_path / "none.py"), "reward.functions.0")


def test_two_functions_of_one_name_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text("def a(completions): ...\ndef b(completions): ...")
    twice = RewardFunction(path=file, entry="a"), RewardFunction(path=file, entry="b")
    with pytest.raises(InputError, match=r"reward.functions.1.name: 'r' names two functions"):
        code_of([Source(functions=twice)])
    named = RewardFunction(path=file, entry="a"), RewardFunction(path=file, entry="b", name="b")
    code_of([Source(functions=named)])


def test_a_column_that_is_not_there_names_the_nearest() -> None:
    trl = signature("def reward(completions, anwser): ...")
    with pytest.raises(InputError, match=r"no column 'anwser'.*Did you mean 'answer'"):
        check_columns(trl, ["answer", "level"], "data.prompts", "compute_score of r.py", has_answers=True)
    takes_answer = signature("def reward(completions, answer): ...")
    check_columns(takes_answer, ["answer"], "data.prompts", "reward of r.py", has_answers=True)
    verl = signature("def compute_score(data_source, solution_str, ground_truth): ...")
    with pytest.raises(InputError, match=r"no right answer for compute_score.*column answer"):
        check_columns(verl, ["level"], "data.prompts", "compute_score of r.py", has_answers=False)
    check_columns(verl, ["reward_model"], "data.prompts", "compute_score of r.py", has_answers=True)


@pytest.mark.parametrize(
    ("source", "arg", "rule"),
    [
        ("def reward(completions, **columns): ...", "completions", "gets this parameter from the answers"),
        ("def compute_score(solution_str, ground_truth): ...", "solution_str", "gets this parameter from the answers"),
        ("def reward_func(queries, prompts, labels): ...", "queries", "gets this parameter from the answers"),
        ("def reward(completions, scale): ...", "scal", "has no such parameter. Did you mean 'scale'"),
    ],
)
def test_arguments_that_a_function_cannot_take_are_refused(source: str, arg: str, rule: str) -> None:
    with pytest.raises(InputError, match=rf"^functions\.0\.args\.{arg}: f of r\.py {rule}"):
        check_args([arg], signature(source), "functions.0", "f of r.py")


def test_a_constant_may_stand_for_a_column() -> None:
    verl = signature("def compute_score(solution_str, ground_truth, data_source): ...")
    check_args(["data_source", "ground_truth"], verl, "functions.0", "f of r.py")
