"""Every key that belongs to others is refused where they are absent, also with its default; stored runs have none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from gspo.common.config.fields import Owner, Section, owners_of
from gspo.common.config.loading import parse_config, read_config, write_config
from gspo.common.config.reward import EnvironmentConfig, RewardFunction
from gspo.common.config.schema import Config
from gspo.common.errors import InputError

MINIMAL: dict[str, Any] = {
    "name": "r",
    "model": {"path": "m"},
    "data": {"prompts": "p.jsonl"},
    "reward": {"functions": [{"url": "http://a:1"}]},
    "run": {"total_steps": 3},
}
PATH, SERVER, TOOLS = (
    {"environment.path": "e.py"},
    {"environment.url": "http://b:1"},
    {"environment.mcp.url": "http://b:1"},
)
AGENT, ALONE = {"agent.external": True, "gateway.replicas": 1}, {"teacher.path": "t", "teacher.alone": True}
# Values that sources may have for themselves, by their keys for all.
OF_SOURCES: dict[str, Any] = {
    "data.prompt_column": "q",
    "data.answer_column": "a",
    "data.types": {},
    "data.chat_template_kwargs": {},
    "reward.functions": [{"builtin": "exact_match"}],
    "environment": {"path": "b"},
    "sampling.stop": [],
    "sampling.temperature": 0.5,
}
# The text of an owner -> values without it, where neither the minimal configuration nor an empty section is.
BESIDE: dict[str, dict[str, Any]] = {
    "path": SERVER,
    "the name of a registered version alone": SERVER,
    "path, builtin or a registered name in place of url": SERVER,
    "environment.url": PATH,
    "environment.url or mcp": PATH,
    "environment.turn_tokens": PATH,
    "environment.protocol: openenv": SERVER,
    "protocol: openenv, whose actions have none": SERVER | {"environment.protocol": "openenv"},
    "mcp, whose server has keys of its own": TOOLS,
    "mcp, whose server lists its tools, of which environment.mcp.tools chooses": TOOLS,
    "environment.mcp.command": TOOLS,
    "agent.path": AGENT,
    "agent.path or agent.command": AGENT,
    "an agent, whose requests run to their ends": AGENT,
    "teacher.path": {"teacher.address": "http://a:1", "teacher.model": "t"},
    "teacher.address": {"teacher.path": "t"},
    "teacher.alone: true, where rewards have no part in the advantages": ALONE,
    "teacher.alone: true with teacher.kl_in: loss, where every advantage is 0": ALONE | {"teacher.kl_in": "loss"},
    "algorithm.importance_sampling: seq": {"algorithm.preset": "grpo"},
    "algorithm.objective: clip and algorithm.importance_sampling: seq": {"algorithm.objective": "cispo"},
    "algorithm.loss.path, whose function is the whole loss of a token": {"algorithm.loss.path": "l.py"},
    "staleness.max_lag of at least 1": {"staleness.max_lag": 0},
    "several clipped updates a step, by algorithm.num_mini_batches or ppo_epochs": {"algorithm.num_mini_batches": 1},
    "learner.lora.rank, whose adapters are matrices alone": {"learner.lora.rank": 8},
    **{
        f"data.sources that all have their own {(name := key.rpartition('.')[2])}": {
            "data.sources": [{"name": "s", "prompts": "p.jsonl", name: value}],
            "data.prompts": None,
        }
        for key, value in OF_SOURCES.items()
    },
}
# Of keys that are off by default, in the order in which they are tried.
ON: tuple[Any, ...] = (
    *(True, 3, 0.5, "a", "end", "group", "http://a:1", "0123456789", ["calculator"], ["a:443"], {"a": 1.0}),
    *({"a": "text"}, {"path": "a"}, [{"path": "a"}]),
)
# A value of each key that says a kind.
KIND_VALUES: dict[str, Any] = {
    "external": True,
    "command": ["a"],
    "mcp": {"url": "http://a:1"},
    "sources": [{"name": "s", "prompts": "p.jsonl"}],
    **dict.fromkeys(("url", "address"), "http://a:1"),
    **dict.fromkeys(("path", "prompts"), "a"),
}
RULE = re.compile(r"has no effect (without|beside) .+\. Leave it out")
OFF: tuple[Any, ...] = (None, False, (), {}, "")


def sections(section: type[Section], path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield the sections of a configuration by their keys; of a list the first member."""
    yield path, section
    for name, field in section.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                part = f"{name}.0" if kind is RewardFunction else name
                yield from sections(kind, f"{path}.{part}" if path else part)


# The sections but those of data.sources, which are as the ones that a source replaces.
SECTIONS = {path: section for path, section in sections(Config) if not path.startswith("data.sources")}


def owned_keys() -> Iterator[Any]:
    """Yield each key with its default and one of its owners."""
    for path, section in SECTIONS.items():
        for name in {**section.model_fields, **section.OWNED}:
            parents, _, last = (key := f"{path}.{name}".strip(".")).rpartition(".")
            default = SECTIONS[parents].model_fields[last].get_default(call_default_factory=True, validated_data={})
            for owner in owners_of(section, name):
                yield pytest.param(key, default, owner, id=f"{key}-{owner.text}")


def with_keys(keys: dict[str, Any], *, without: str = "") -> dict[str, Any]:
    """The minimal configuration with other keys; `without` names a section whose keys are left out."""
    config = deepcopy(MINIMAL)
    for key, value in keys.items():
        path, _, name = key.rpartition(".")
        place: Any = config
        for part in path.split(".") if path else ():
            place = place[0] if part == "0" else place.setdefault(part, {})
        if path and path == without:
            place.clear()
            without = ""
        place[name] = value
    return config


@pytest.mark.parametrize(("key", "default", "owner"), list(owned_keys()))
def test_a_key_without_its_owner_is_refused(key: str, default: Any, owner: Owner) -> None:
    beside, is_off = BESIDE.get(owner.text, {}), isinstance(default, Section) or default in OFF
    errors = []
    for value in ON if is_off else (default,):
        with pytest.raises(InputError) as caught:
            parse_config(with_keys({key: value, **beside}), Path("/base"))
        errors.append(str(caught.value))
    refused = [error for error in errors if error.startswith(f"{key}: ") and " has no effect " in error]
    assert refused and all(RULE.search(error) for error in refused), errors
    if is_off and not isinstance(default, Section) and key != "algorithm.reward_norm":  # null contradicts grpo
        assert parse_config(with_keys({key: default, **beside}), Path("/base")), "a value that is off is taken anywhere"


@pytest.mark.parametrize(
    ("path", "first", "second"),
    [(path, *pair) for path, section in SECTIONS.items() for pair in combinations(section.KINDS, 2)],
)
def test_a_section_is_of_one_kind(path: str, first: str, second: str) -> None:
    values = KIND_VALUES | {"builtin": "tools" if path == "environment" else "exact_match"}
    keys = with_keys({f"{path}.{second}": values[second], f"{path}.{first}": values[first]}, without=path)
    with pytest.raises(InputError, match="and it is one of them") as caught:
        parse_config(keys, Path("/base"))
    assert (caught.value.where, caught.value.rule.split(",")[0]) == (f"{path}.{second}", f"stands beside {first}")


def test_a_switch_that_is_written_as_off_keeps_its_keys() -> None:
    """ROLL's own form. Its key has no owner."""
    keys = deepcopy(MINIMAL) | {"algorithm": {"use_kl_loss": False, "kl_loss_coef": 0.1, "kl_kind": "k1"}}
    config = parse_config(keys, Path("/base"))
    assert (config.algorithm.use_kl_loss, config.algorithm.kl_loss_coef) == (False, 0.1)
    assert config.missing_owner("algorithm.kl_loss_coef") is not None


STORED = sorted((Path(__file__).parent / "stored").glob("*.yaml"))


def check_stored(path: Path, words: str) -> None:
    """A user's file is refused in these words; in a run directory it is read, and written back the same."""
    with pytest.raises(InputError, match=words):
        read_config(path)
    (path.parent / "environment.json").write_text("{}")
    config = read_config(path)
    write_config(config, path)
    assert read_config(path) == config


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.stem)
def test_a_run_that_was_stored_with_the_keys_of_all_kinds_is_read(tmp_path: Path, file: Path) -> None:
    """Those without an effect are left out where they have their defaults, and named where they have not."""
    path, keys = tmp_path / "config.yaml", yaml.safe_load(file.read_text())
    path.write_text(yaml.safe_dump(keys))
    check_stored(path, "has no effect without")
    learner = read_config(path).learner
    assert learner.lora.rank or not learner.decay_matrices_only  # it began before this key
    path.write_text(yaml.safe_dump(keys | {"algorithm": keys["algorithm"] | {"overlong_penalty": 7.0}}))
    with pytest.raises(InputError, match=r"algorithm\.overlong_penalty: 7\.0 has no effect"):
        read_config(path)


@pytest.mark.parametrize(
    "keys",
    [
        {**AGENT, "agent.workers": 8, "agent.entry": "play"},
        {**ALONE, "teacher.kl_in": "loss", "algorithm.reward_norm": "group", "algorithm.pg_clip_low": 3e-4},
        {"algorithm.loss.path": "l.py", "algorithm.preset": "grpo", "algorithm.importance_sampling": "seq"},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_a_stored_run_has_keys_that_got_an_owner_since(tmp_path: Path, keys: dict[str, Any]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(with_keys(keys) | {"format": 2}))
    check_stored(path, "has no effect")


def test_a_configuration_of_a_later_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(MINIMAL | {"format": 3}))
    with pytest.raises(InputError, match="has the format 3"):
        read_config(tmp_path / "config.yaml")


def test_an_environment_of_a_server_stores_the_keys_of_servers() -> None:
    assert EnvironmentConfig.model_validate({"path": "a.py", "entry": "Maze"}).model_dump()["entry"] == "Maze"
    environment = EnvironmentConfig(url="http://a:1")
    assert {"ping_every_s", "step_timeout_s"} <= environment.model_dump().keys()
    assert not {"entry", "memory_mb", "action_field"} & environment.model_dump().keys()
