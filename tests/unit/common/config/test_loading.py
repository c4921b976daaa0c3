"""Reading a configuration: errors that name the key, paths, resuming, and the explanation of every key."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo.common.config.loading import (
    _OTHER_NAMES,
    FORMAT,
    changed_keys,
    check_resume,
    parse_config,
    read_config,
    write_config,
)
from gspo.common.config.reference import explain
from gspo.common.config.schema import Config
from gspo.common.errors import NO_VALUE, ConfigError, InputError


def refusal(minimal: dict[str, Any]) -> InputError:
    with pytest.raises(InputError) as error:
        parse_config(minimal, Path())
    return error.value


def test_a_complete_configuration_has_every_default(minimal: dict[str, Any]) -> None:
    config = parse_config(minimal, Path())
    assert (config.staleness.max_lag, config.algorithm.rollout_batch_size, config.num_slots) == (1, 64, 128)
    assert config.staleness.token_age_limit == 1


@pytest.mark.parametrize(
    ("section", "key", "fix"),
    [
        (None, "learnr", "Did you mean 'learner'?"),
        ("algorithm", "loss_aggregation_mode", "Did you mean 'loss_agg_mode'?"),
        ("staleness", "max_lagg", "Did you mean 'max_lag'?"),
        ("model", "zzz", "Known are: allow_pickle, path, trust_remote_code."),
        ("algorithm", "max_lag", "Did you mean staleness.max_lag?"),
    ],
)
def test_an_unknown_key_names_the_nearest(minimal: dict[str, Any], section: str | None, key: str, fix: str) -> None:
    (minimal.setdefault(section, {}) if section else minimal)[key] = 7
    error = refusal(minimal)
    assert error.where == (f"{section}.{key}" if section else key)
    assert error.rule == "is not a key (value 7)"
    assert error.fix == fix


def test_a_name_of_another_trainer_leads_to_the_key(minimal: dict[str, Any]) -> None:
    minimal.setdefault("algorithm", {})["max_completion_length"] = 7
    assert refusal(minimal).fix == "The key for it is algorithm.response_length (docs/migration.md)"
    assert set(_OTHER_NAMES.values()) <= {key.name for key in explain()}
    assert not _OTHER_NAMES.keys() & {key.name.rpartition(".")[2] for key in explain()}


def test_an_unknown_key_of_a_reward_function_names_the_nearest(minimal: dict[str, Any]) -> None:
    minimal["reward"]["functions"][0]["wheight"] = 2
    error = refusal(minimal)
    assert error.where == "reward.functions.0.wheight"
    assert error.fix.startswith("Did you mean 'weight'?")


def test_a_missing_key_says_what_it_means(minimal: dict[str, Any]) -> None:
    del minimal["data"]["prompts"]
    error = refusal(minimal)
    assert (error.where, error.rule) == ("data.prompts", "is missing")
    assert "Training prompts" in error.fix


def test_a_wrong_type_shows_the_value(minimal: dict[str, Any]) -> None:
    minimal["run"]["total_steps"] = "many"
    error = refusal(minimal)
    assert error.where == "run.total_steps"
    assert error.rule.startswith("many is not allowed")


def test_every_wrong_key_is_listed(minimal: dict[str, Any], tmp_path: Path) -> None:
    minimal["run"] |= {"total_steps": -1, "checkpoint_every": 0}
    minimal["algorithm"] = {"dual_clip_loss": "much", "learning_rate": 1}
    del minimal["name"]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(minimal))
    with pytest.raises(InputError) as error:
        read_config(tmp_path / "c.yaml")
    head, *lines = str(error.value).splitlines()
    assert head == f"{tmp_path / 'c.yaml'}: 5 keys are wrong. Correct each of them:"
    assert [line.split(": ")[0].strip() for line in lines] == [
        "name",
        "algorithm.dual_clip_loss",
        "algorithm.learning_rate",
        "run.total_steps",
        "run.checkpoint_every",
    ]
    assert lines[2].endswith("is not a key (value 1). Did you mean learner.learning_rate?")


def _float_keys() -> list[str]:
    """Every key that takes a number which need not be whole."""
    return [key.name for key in explain() if "number" in key.type.split(" | ")]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), "1e999"])
def test_no_number_of_any_key_may_be_infinite(minimal: dict[str, Any], value: Any) -> None:
    keys = _float_keys()
    assert len(keys) > 30
    for key in keys:
        *sections, name = key.split(".")
        changed = deepcopy(minimal)
        place = changed
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
        assert refusal(changed).where == key, key


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("generation.engine", {"generation": {"engine": {"a": {"b": [1.0, float("nan")]}}}}),
        ("reward.functions.0.weight", {"reward": {"functions": [{"path": "r.py", "weight": float("inf")}]}}),
        ("reward.functions.0.args", {"reward": {"functions": [{"path": "r.py", "args": {"x": float("inf")}}]}}),
        ("environment.tools.0", {"environment": {"path": "e.py", "tools": [{"x": float("inf")}]}}),
    ],
)
def test_no_number_within_a_value_may_be_infinite(minimal: dict[str, Any], where: str, change: dict[str, Any]) -> None:
    assert refusal(minimal | change).where == where


def test_no_message_shows_a_python_value(minimal: dict[str, Any]) -> None:
    """Values are shown as YAML, as their user wrote them."""
    minimal["data"]["shuffle"], minimal["modle"] = [True, None, {"a": "b"}], {"path": "x"}
    minimal["learner"] = {"lora": {"target_modules": ["q_proj"]}}
    text = str(refusal(minimal))
    assert "data.shuffle: [true, null, {a: b}] is not allowed" in text
    assert "modle: is not a key (value {path: x})" in text
    assert "learner.lora.target_modules: [q_proj] has no effect" in text


def test_a_changed_list_of_functions_is_shown_as_yaml(minimal: dict[str, Any]) -> None:
    new = {**minimal, "reward": {"functions": [{"builtin": "numeric", "args": {"x": 1}}]}}
    with pytest.raises(InputError) as error:
        check_resume(parse_config(minimal, Path("/a")), parse_config(new, Path("/a")))
    assert error.value.rule == (
        "cannot change on resume (reward.functions was [{path: /a/reward.py}] and is now "
        "[{builtin: numeric, args: {x: 1}}])"
    )


def test_an_unknown_key_in_a_list_is_one_problem(minimal: dict[str, Any]) -> None:
    minimal["reward"]["functions"][0]["wieght"] = 2
    error = refusal(minimal)
    assert (error.where, error.fix) == ("reward.functions.0.wieght", "Did you mean 'weight'?")


@pytest.mark.parametrize(
    ("section", "keys", "where"),
    [
        ("sampling", {"top_p": 0.9}, "sampling.top_p"),
        ("sampling", {"top_p": 1.1, "top_k": 20}, "sampling.top_p"),
        ("sampling", {"top_k": 65}, "sampling.top_k"),
        ("sampling", {"top_k": 1}, "sampling.top_k"),
        ("sampling", {"top_k": -2}, "sampling.top_k"),
        ("sampling", {"min_p": 0.1}, "sampling.min_p"),
        ("run", {"total_steps": None}, "run.total_steps"),
        ("learner", {"schedule": "cosine"}, "learner.schedule"),
    ],
)
def test_a_contradiction_names_its_key(minimal: dict[str, Any], section: str, keys: dict[str, Any], where: str) -> None:
    if section == "learner":
        minimal["run"] = {"total_hours": 1}
    minimal.setdefault(section, {}).update(keys)
    error = refusal(minimal)
    assert error.where == where
    assert error.fix


def test_a_rule_of_two_sentences_stays_apart_from_the_fix() -> None:
    error = ConfigError("lora.rank", 3, "is odd. Adapters come in pairs", "Set 4").as_input_error("learner")
    assert (error.where, error.rule, error.fix) == ("learner.lora.rank", "3 is odd. Adapters come in pairs", "Set 4")
    assert ConfigError("", NO_VALUE, "is empty", "Fill it").as_input_error("a.b").rule == "is empty"


@pytest.mark.parametrize("off", [{"top_p": 1.0}, {"top_k": -1}, {"top_k": 0}, {"min_p": 0.0}])
def test_sampling_that_is_off_is_allowed(minimal: dict[str, Any], off: dict[str, float]) -> None:
    minimal["sampling"] = off
    parse_config(minimal, Path())


@pytest.mark.parametrize("keys", [{"top_k": 20, "top_p": 0.95}, {"top_k": 64, "min_p": 0.05}, {"top_k": 2}])
def test_sampling_from_few_tokens_is_allowed(minimal: dict[str, Any], keys: dict[str, float]) -> None:
    minimal["sampling"] = keys
    assert parse_config(minimal, Path()).sampling.cuts


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ({"teacher": {"address": "http://t:1", "model": "m"}}, "a server (teacher.address) gives those over all"),
        ({"generation": {"draft_tokens": 4}}, "ends vLLM's process at a step without drafts"),
        (
            {"agent": {"external": True, "sampling": "client"}, "gateway": {"replicas": 1}},
            "has no effect under agent.sampling: client",
        ),
    ],
)
def test_what_gives_no_log_probs_over_a_set_is_refused_beside_top_k(
    minimal: dict[str, Any], keys: dict[str, Any], rule: str
) -> None:
    parse_config(minimal | keys, Path())
    error = refusal(minimal | keys | {"sampling": {"top_k": 20}})
    assert error.where == "sampling.top_k"
    assert rule in error.rule


@pytest.mark.parametrize("name", ["", "-x", "a/b", "a b", "x" * 65, "{x}"])
def test_a_name_is_also_a_folder_and_part_of_a_key(minimal: dict[str, Any], name: str) -> None:
    minimal["name"] = name
    error = refusal(minimal)
    assert error.where == "name"
    assert "letters a-z and A-Z, digits, and . _ -" in error.fix


@pytest.mark.parametrize(
    ("text", "trainer", "word"),
    [
        ("data: {}\nactor_rollout_ref:\n  hybrid_engine: true\n", "verl", "actor_rollout_ref"),
        ("python3 -m verl.trainer.main_ppo \\\n  actor_rollout_ref.rollout.n=8\n", "verl", "actor_rollout_ref"),
        ("deepspeed --module openrlhf.cli.train_ppo_ray\n", "OpenRLHF", "openrlhf"),
        ("actor_infer: {}\nactor_train: {per_device_train_batch_size: 1}\n", "ROLL", "actor_infer"),
        ("trial_name: a\ngconfig: {n_samples: 4}\n", "AReaL", "gconfig"),
        ("ARGS=(\n   --rollout-batch-size 4\n)\n", "slime", "rollout-batch-size"),
        ("max_steps = 20\n[model]\n[orchestrator]\n", "prime-rl", "orchestrator"),
        ("num_generations: 16\nseed: 42\n", "TRL", "num_generations"),
    ],
)
def test_a_file_of_another_trainer_is_one_error_that_names_it(
    tmp_path: Path, text: str, trainer: str, word: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_config(path)
    assert error.value.where == str(path)
    assert error.value.rule == f"is a file of {trainer}, by its word '{word}'"
    assert error.value.fix.endswith(f"docs/migration.md has the keys of {trainer}")


def test_a_comment_or_a_value_about_another_trainer_does_not_hide_the_error(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("# from verl's actor_rollout_ref\nname: [\n")
    with pytest.raises(InputError, match="is not YAML"):
        read_config(path)
    path.write_text("name: num_generations\n")
    with pytest.raises(InputError, match="model: is missing"):
        read_config(path)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("a: [1", "is not YAML"),
        ("- 1", "is not a mapping"),
        ("", "is not a mapping"),
    ],
)
def test_a_file_without_a_mapping_is_named(tmp_path: Path, text: str, rule: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_config(path)
    assert error.value.where == str(path)
    assert error.value.rule.startswith(rule)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name: a\nrun:\n  total_steps: 3\n  total_steps: 4\n", "line 4, column 3: 'total_steps' is there twice"),
        ("name: a\n  x: 1\n", "line 2, column 4: mapping values are not allowed here"),
        ("name: [1\n", "line 2, column 1: while parsing a flow sequence: "),
        ("name: \x07", "at position 6"),
    ],
)
def test_an_error_of_yaml_is_named_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(InputError) as error:
        read_config(tmp_path / "config.yaml")
    assert str(error.value).startswith(f"{tmp_path / 'config.yaml'}: is not YAML: ")
    assert problem in error.value.rule
    assert "<unicode string>" not in error.value.rule


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"name: \xff\n")
    with pytest.raises(InputError, match=r"config\.yaml: is not UTF-8"):
        read_config(tmp_path / "config.yaml")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_config(tmp_path / "none.yaml")


def test_paths_are_relative_to_the_file(tmp_path: Path, minimal: dict[str, Any]) -> None:
    (tmp_path / "model").mkdir()
    minimal["evaluation"] = {"prompts": "held-out.jsonl"}
    minimal["services"] = {"token_file": "/run/secrets/token"}
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(minimal))
    config = read_config(path)
    assert config.data.prompts == tmp_path / "prompts.jsonl"
    assert config.evaluation.prompts == tmp_path / "held-out.jsonl"
    assert config.reward.functions[0].path == tmp_path / "reward.py"
    assert config.run_dir == tmp_path / "runs" / "r"
    assert config.model.path == str(tmp_path / "model")
    assert config.services.token_file == Path("/run/secrets/token")


def test_every_path_is_relative_to_the_file_and_a_second_reading_changes_none(
    tmp_path: Path, minimal: dict[str, Any]
) -> None:
    """A key of the type path that is not of FilePath would stay relative."""
    # An agent excludes an environment: test_agent_keys.py has its path.
    names = [key.name for key in explain() if "path" in key.type.split(" | ") and key.name != "agent.path"]
    assert len(names) > 10
    for name in names:
        *sections, last = name.split(".")
        section = minimal
        for part in sections:
            section = section.setdefault(part, {})
        section[last] = f"folder/{last}"
    minimal["reward"]["functions"][0]["reads"] = ["folder/reads"]
    minimal["environment"]["reads"] = ["folder/reads"]
    minimal["evaluation"]["prompts"] = {"a": "folder/prompts"}
    config = parse_config(minimal, tmp_path)
    written = str(config.model_dump(mode="json"))
    assert written.count("folder/") == written.count(f"{tmp_path}/folder/") == len(names) + 2
    assert parse_config(config.model_dump(), tmp_path / "elsewhere") == config


def test_a_model_path_without_a_folder_is_a_hub_name(tmp_path: Path, minimal: dict[str, Any]) -> None:
    minimal["model"]["path"] = "Qwen/Qwen3-0.6B"
    assert parse_config(minimal, tmp_path).model.path == "Qwen/Qwen3-0.6B"


def test_a_written_configuration_has_the_keys_with_an_effect_and_reads_as_the_same(
    tmp_path: Path, minimal: dict[str, Any]
) -> None:
    minimal["algorithm"] = {"preset": "roll-gspo", "dual_clip_loss": 3.0}
    config = parse_config(minimal, tmp_path)
    path = tmp_path / "elsewhere" / "config.yaml"
    path.parent.mkdir()
    write_config(config, path)
    assert read_config(path) == config
    written = yaml.safe_load(path.read_text())
    assert written["format"] == FORMAT
    assert {"kl_loss_coef", "gamma", "advantage_clip"} <= written["algorithm"].keys()
    assert not {"kl_coef", "behavior_low", "overlong_penalty"} & written["algorithm"].keys()
    assert (written["teacher"], written["evaluation"]) == ({"path": None, "address": None}, {"prompts": None})


def _changed(minimal: dict[str, Any], section: str, **keys: Any) -> Config:
    changed = deepcopy(minimal)
    changed.setdefault(section, {}).update(keys)
    return parse_config(changed, Path())


def test_a_resume_may_change_the_keys_that_allow_it(minimal: dict[str, Any]) -> None:
    old = parse_config(minimal, Path())
    new = _changed(minimal, "learner", learning_rate=1e-5)
    check_resume(old, new)
    assert [(key.name, before, after) for key, before, after in changed_keys(old, new)] == [
        ("learner.learning_rate", 1e-6, 1e-5)
    ]


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("run", {"total_steps": 9}),
        ("run", {"checkpoint_every": 1}),
        ("staleness", {"max_lag": 3}),
        ("generation", {"replicas": 2}),
        ("services", {"log_level": "debug"}),
        ("learner", {"micro_batch_tokens": 100_000}),
        ("learner", {"gradient_checkpointing": True}),
        ("learner", {"zero_stage": 3, "offload": "all"}),
        ("learner", {"packing": False}),
    ],
)
def test_keys_that_may_change(minimal: dict[str, Any], section: str, keys: dict[str, Any]) -> None:
    check_resume(parse_config(minimal, Path()), _changed(minimal, section, **keys))


@pytest.mark.parametrize(
    ("staleness", "on_update", "fix"),
    [
        ({"max_lag": 0}, "recompute", "Leave it out, or raise max_lag"),
        ({"max_lag": 0, "on_stale": "mask"}, "recompute", "Leave it out, or raise max_lag"),
        ({"max_lag": 3}, "recompute", "Set staleness.max_lag: 4 or more, on_stale: mask, or longer segments"),
        ({"max_lag": 3, "on_stale": "drop"}, "keep", "Set staleness.max_lag: 4 or more, on_stale: mask, or longer"),
        ({"max_lag": 4}, "restart", "Leave one of them out"),
        ({"max_lag": 4}, "recompute", None),
        ({"max_lag": 4, "on_stale": "drop"}, "keep", None),
        ({"max_lag": 1, "on_stale": "mask"}, "recompute", None),
    ],
)
def test_segments_need_later_steps(
    minimal: dict[str, Any], staleness: dict[str, Any], on_update: str, fix: str | None
) -> None:
    """Answers of 1,000 tokens in segments of 300 take four steps."""
    minimal["staleness"] = staleness
    minimal["algorithm"] = {"response_length": 1000}
    minimal["generation"] = {"segment_tokens": 300, "on_update": on_update}
    if fix is None:
        assert parse_config(minimal, Path()).generation.segment_tokens == 300
        return
    error = refusal(minimal)
    assert error.where == "generation.segment_tokens"
    assert error.fix.startswith(fix)


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("algorithm", {"num_mini_batches": 2}),
        ("algorithm", {"preset": "grpo"}),
        ("data", {"prompts": "others.jsonl"}),
        ("model", {"path": "other"}),
        ("sampling", {"temperature": 0.5}),
        ("learner", {"dtype": "bfloat16"}),
    ],
)
def test_any_other_change_is_refused_by_name(minimal: dict[str, Any], section: str, keys: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="cannot change on resume") as error:
        check_resume(parse_config(minimal, Path()), _changed(minimal, section, **keys))
    for key, value in keys.items():
        assert f"{section}.{key} was " in str(error.value)
        assert str(value) in str(error.value)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_the_number_of_ranks_may_change(minimal: dict[str, Any], zero_stage: int) -> None:
    old, new = (_changed(minimal, "learner", ranks=ranks, zero_stage=zero_stage) for ranks in (2, 1))
    check_resume(old, new)


def test_every_refused_change_is_listed(minimal: dict[str, Any]) -> None:
    new = _changed({**minimal, "seed": 7}, "data", shuffle=False)
    with pytest.raises(InputError) as error:
        check_resume(parse_config(minimal, Path()), new)
    assert error.value.where == "seed"
    assert "seed was 0 and is now 7; data.shuffle was true and is now false" in error.value.rule


def test_every_key_is_explained() -> None:
    keys = explain()
    assert len({key.name for key in keys}) == len(keys) > 80
    for key in keys:
        assert key.meaning, key.name
        assert key.type, key.name
        assert "<class" not in key.type + key.default, key.name
        assert "PydanticUndefined" not in key.default, key.name


@pytest.mark.parametrize(
    ("name", "type_", "default", "bounds", "on_resume"),
    [
        ("seed", "integer", "0", ">= 0, < 2147483648", False),
        ("staleness.max_lag", "integer", "1", ">= 0, <= 64", True),
        ("staleness.on_stale", "wait | drop | mask", "wait", "", True),
        ("model.path", "text", "required", "", False),
        ("algorithm.pg_clip_low", "number | null", "null", "<= 1, > 0", False),
        ("data.shuffle", "true | false", "true", "", False),
        (
            "reward.allowed_packages",
            "list of text",
            "[numpy, sympy, math-verify, regex, rapidfuzz, jsonschema]",
            "",
            True,
        ),
        ("generation.engine", "mapping", "{}", "", True),
    ],
)
def test_a_key_is_explained_with_type_default_and_bounds(
    name: str, type_: str, default: str, bounds: str, on_resume: bool
) -> None:
    key = next(key for key in explain() if key.name == name)
    assert (key.type, key.default, key.bounds, key.on_resume) == (type_, default, bounds, on_resume)


@pytest.mark.parametrize(
    ("sections", "where", "rule"),
    [
        ({}, "staleness.max_lag", "lets generators work while the learner trains"),
        ({"staleness": {"max_lag": 0}, "generation": {"on_update": "keep"}}, "generation.on_update", "keeps the KV"),
        ({"staleness": {"max_lag": 0}, "generation": {"segment_tokens": 9}}, "generation.segment_tokens", "pauses"),
    ],
)
def test_what_contradicts_shared_gpus_is_refused(
    minimal: dict[str, Any], sections: dict[str, Any], where: str, rule: str
) -> None:
    with pytest.raises(InputError) as refused:
        parse_config({**minimal, **sections, "placement": "shared"}, Path())
    assert refused.value.where == where and refused.value.rule.partition(" ")[2].startswith(rule)


def test_shared_gpus_without_a_lag_are_accepted(minimal: dict[str, Any]) -> None:
    assert parse_config({**minimal, "placement": "shared", "staleness": {"max_lag": 0}}, Path()).placement == "shared"
    assert parse_config(minimal, Path()).placement == "split"


def test_paths_have_homes_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PLACE", "some/where")
    (tmp_path / "has $PLACE").mkdir()
    keys: dict[str, Any] = {
        "name": "r",
        "model": {"path": "~/model"},
        "data": {"prompts": ["~/p.jsonl", "$PLACE/p.csv", "${PLACE}s.json", "has $PLACE", "5$"]},
        "reward": {"functions": [{"path": "$PLACE/r.py"}]},
        "run": {"total_steps": 3},
    }
    config = parse_config(keys, tmp_path)
    assert config.model.path == str(tmp_path / "home" / "model")
    names = [str(path.relative_to(tmp_path)) for path in config.sources[0].prompts]
    assert names == ["home/p.jsonl", "some/where/p.csv", "some/wheres.json", "has $PLACE", "5$"]
    assert config.reward.functions[0].path == tmp_path / "some/where/r.py"
    for path, problem in {
        "$NONE/p": "variable NONE, which is not set",
        "~nobody-here/p": "a user who has none",
    }.items():
        for section in ({"data": {"prompts": path}}, {"model": {"path": path}}, {"data": {"prompts": ["x", path]}}):
            with pytest.raises(InputError, match=problem):
                parse_config({**keys, **section}, tmp_path)
