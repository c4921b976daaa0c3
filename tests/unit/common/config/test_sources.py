"""Several sources of prompts in a configuration: their own values, and the refused ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo.common.config.evaluation import BestFigure
from gspo.common.config.loading import parse_config
from gspo.common.config.schema import Config
from gspo.common.config.sources import MOST_SOURCES, code_of
from gspo.common.errors import InputError

EXACT = {"builtin": "exact_match"}
SUM = {"name": "sum", "prompts": "sum.jsonl", "weight": 3}
GUESS = {"name": "guess", "prompts": "guess.jsonl", "functions": [], "environment": {"path": "env.py"}}


def read(sources: Any = (SUM, GUESS), **sections: Any) -> Config:
    keys = {
        "name": "r",
        "model": {"path": "m"},
        "data": {"sources": list(sources), **sections.pop("data", {})},
        "reward": {"functions": [EXACT]},
        "run": {"total_steps": 3},
    }
    return parse_config({**keys, **sections}, Path("/c"))


def test_a_source_has_the_values_of_the_sections_unless_it_has_its_own() -> None:
    own = {
        **SUM,
        "prompt_column": "question",
        "chat_template_kwargs": {"enable_thinking": True},
        "functions": [{"path": "r.py"}],
        "stop": ["\n"],
        "temperature": 0.7,
    }
    config = read([own, {"name": "b", "prompts": "b.jsonl"}], sampling={"stop": ["."]}, environment={"path": "env.py"})
    first, second = config.sources
    assert (first.name, first.prompts, first.weight, first.stop) == ("sum", (Path("/c/sum.jsonl"),), 3.0, ("\n",))
    assert (first.prompt_column, first.key("prompt_column")) == ("question", "data.sources.0.prompt_column")
    assert [key for key, _ in first.code()] == ["data.sources.0.functions.0", "environment"]
    assert [source.temperature for source in config.sources] == [0.7, 1.0]
    assert [source.chat_template_kwargs for source in config.sources] == [{"enable_thinking": True}, {}]
    assert config.several_temperatures
    assert (second.prompt_column, second.key("prompt_column"), second.stop) == ("prompt", "data.prompt_column", (".",))
    assert [key for key, _ in second.code()] == ["reward.functions.0", "environment"]
    assert [source.key("prompts") for source in config.sources] == ["data.sources.0.prompts", "data.sources.1.prompts"]


def test_data_prompts_is_the_only_source_without_a_name() -> None:
    (only,) = read((), data={"prompts": "p.jsonl"}).sources
    assert (only.name, only.prompts, only.key("prompts")) == ("", (Path("/c/p.jsonl"),), "data.prompts")
    assert [key for key, _ in only.code()] == ["reward.functions.0"]


def test_prompts_may_be_a_list_of_files() -> None:
    config = read([{**SUM, "prompts": ["a.jsonl", "b.csv"], "types": {"n": "number"}, "answer_column": "n"}, GUESS])
    first, second = config.sources
    assert first.prompts == (Path("/c/a.jsonl"), Path("/c/b.csv"))
    assert (first.types, first.answer_column, second.types, second.answer_column) == ({"n": "number"}, "n", {}, None)
    assert read((), data={"prompts": ["a.jsonl", "b.csv"]}).sources[0].prompts == first.prompts


def test_one_temperature_for_all_is_the_runs() -> None:
    assert not read(sampling={"temperature": 0.7}).several_temperatures
    assert not read([{**SUM, "temperature": 1.0}, GUESS]).several_temperatures
    assert read([{**SUM, "temperature": 0.7}]).several_temperatures


def test_an_empty_environment_is_none() -> None:
    alone = {"name": "alone", "prompts": "a.jsonl", "environment": {}}
    config = read([alone, {"name": "b", "prompts": "b.jsonl"}], environment={"path": "env.py"})
    assert [source.environment.used for source in config.sources] == [False, True]


@pytest.mark.parametrize(
    ("sources", "sections", "message"),
    [
        ((), {}, r"data.prompts: is missing"),
        ((SUM,), {"data": {"prompts": "p.jsonl"}}, r"data.sources: stands beside prompts"),
        ((SUM, SUM), {}, r"data.sources.1.name: sum names two sources"),
        (({**SUM, "weight": 0},), {}, r"data.sources.0.weight: 0 is not allowed"),
        (({**SUM, "weight": -1},), {}, r"data.sources.0.weight: -1 is not allowed"),
        (({**SUM, "wieght": 1},), {}, r"data.sources.0.wieght: is not a key .* Did you mean 'weight'"),
        (({"name": "sum"},), {}, r"data.sources.0.prompts: is missing"),
        (({**SUM, "name": "a/b"},), {}, r"data.sources.0.name: a/b is not allowed"),
        (({**SUM, "functions": [{}]},), {}, r"data.sources.0.functions.0.path: is missing"),
        (({**SUM, "functions": []},), {"reward": {}}, r"data.sources.0.functions: is empty for source 'sum'"),
        ((SUM,), {"reward": {}}, r"reward.functions: is empty for source 'sum'"),
        (
            (GUESS, {**GUESS, "name": "b", "functions": [{"path": "env.py"}]}),
            {"reward": {}},
            r"data.sources.1.functions.0.name: 'env' is the environment's name",
        ),
        (({**SUM, "temperature": 0},), {}, r"data.sources.0.temperature: 0 is not allowed"),
        (({**SUM, "temperature": 0.005},), {}, r"data.sources.0.temperature: 0.005 is not allowed.*0.01"),
        ((SUM,), {"sampling": {"temperature": 2.5}}, r"sampling.temperature: 2.5 is not allowed.*2"),
        ((SUM,), {"sampling": {"stop": [""]}}, r"sampling.stop.0: '' is not allowed"),
        (
            (SUM, {**SUM, "name": "b", "temperature": 0.7}),
            {"teacher": {"address": "http://t:1", "model": "t"}},
            r"data.sources.1.temperature: 0.7 needs the teacher's log-probs at that temperature",
        ),
        (
            (SUM, {**SUM, "name": "b", "stop": ["."]}),
            {"agent": {"external": True}, "gateway": {"replicas": 1}},
            r"data.sources.1.stop: .* has no effect with an agent",
        ),
        (({**SUM, "prompts": []},), {}, r"data.sources.0.prompts: \[\] is neither a file nor a list of files"),
        (({**SUM, "types": {"a": "date"}},), {}, r"data.sources.0.types.*date is not allowed"),
        (
            (SUM, GUESS),
            {"algorithm": {"adv_estimator": "reinforce", "reward_norm": "running"}},
            r"algorithm.reward_norm: running would mix the rewards of all sources",
        ),
        ((SUM, GUESS), {"evaluation": {"prompts": "e.jsonl"}}, r"evaluation.prompts: is of no source"),
        ((SUM, GUESS), {"evaluation": {"prompts": {"sums": "e.jsonl"}}}, r"evaluation.prompts.sums: is of no source"),
        (
            [{**SUM, "name": f"s{number}"} for number in range(MOST_SOURCES + 1)],
            {},
            r"data.sources: .* at most 32 items",
        ),
    ],
)
def test_what_is_refused(sources: Any, sections: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(sources, **sections)


def test_turns_may_be_averaged_where_one_source_has_conversations() -> None:
    turns = {"algorithm": {"loss_agg_mode": "seq-mean-token-sum-turn-norm"}}
    read(**turns)
    with pytest.raises(InputError, match="without an environment"):
        read([SUM], **turns)


def test_code_is_loaded_once_and_a_name_stands_for_one_thing() -> None:
    first = {**SUM, "functions": [{"path": "r.py", "weight": 2}]}
    again = {"name": "again", "prompts": "b.jsonl", "functions": [{"path": "r.py"}]}
    shared = read(
        [first, again, GUESS, {**GUESS, "name": "easy", "environment": {"path": "env.py", "max_turns": 3}}], reward={}
    )
    assert list(code_of(shared.sources)) == ["data.sources.0.functions.0", "data.sources.2.environment"]
    for other in ({"path": "other/r.py"}, {"path": "r.py", "entry": "b"}, {"path": "e.py", "name": "env"}):
        clashing = read([first, {**again, "functions": [other]}, GUESS], reward={})
        with pytest.raises(InputError, match=r"data.sources.[12].(functions.0|environment).name: '(r|env)' names two"):
            code_of(clashing.sources)


def test_the_best_version_has_the_highest_mean_over_the_sources() -> None:
    files = {"sum": "s.jsonl", "guess": "g.jsonl"}
    assert read(evaluation={"prompts": files, "keep_best": "sampled_mean"}).best_figure == BestFigure(
        {"sum": 3.0, "guess": 1.0}, "sampled_mean"
    )
    of_one_file = read(evaluation={"prompts": files, "keep_best": "guess/greedy_mean"}).best_figure
    assert of_one_file == BestFigure({"guess": 1.0}, "greedy_mean")
    # Only one of the sources has this part.
    both = {**GUESS, "functions": [EXACT]}
    read([both, SUM], evaluation={"prompts": files, "keep_best": "guess/part_environment_mean"})
    with pytest.raises(InputError, match="part_environment_mean is not a figure"):
        read([both, SUM], evaluation={"prompts": files, "keep_best": "part_environment_mean"})
