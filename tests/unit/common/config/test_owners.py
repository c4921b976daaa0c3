"""Every key that belongs to others is refused where they are absent, also with its default; stored runs have none."""

from __future__ import annotations

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
SERVER, FUNCTION, TOOLS = (
    {"environment.url": "http://b:1"},
    "reward.functions.0",
    {"environment.mcp": {"url": "http://b:1"}},
)
AGENT = {"agent.external": True, "gateway.replicas": 1}
# Values beside a key, with which it has no owner: without them it would have one, or its section none.
BESIDE: dict[str, dict[str, Any]] = {
    "algorithm.gamma": {"algorithm.adv_estimator": "rloo"},
    "algorithm.ratio_of": {"algorithm.preset": "grpo"},
    "algorithm.pg_clip_reference_length": {"algorithm.objective": "cispo"},
    "environment.entry": SERVER,
    "environment.reads": SERVER,
    "environment.memory_mb": SERVER,
    "environment.long_turn": SERVER,
    "environment.mcp.reads": {"environment.mcp.url": "http://b:1"},
    "environment.mcp.memory_mb": {"environment.mcp.url": "http://b:1"},
    "environment.weight": TOOLS,
    "environment.tools": TOOLS,
    "environment.step_timeout_s": TOOLS,
    f"{FUNCTION}.entry": {f"{FUNCTION}.builtin": "exact_match"},
    f"{FUNCTION}.version": {f"{FUNCTION}.builtin": "exact_match"},
    "teacher.trust_remote_code": {"teacher.address": "http://a:1", "teacher.model": "t"},
    "teacher.allow_pickle": {"teacher.address": "http://a:1", "teacher.model": "t"},
    **{f"agent.{key}": AGENT for key in ("reads", "hosts", "workers", "memory_mb", "entry")},
}
OWN_VALUES: dict[str, Any] = {
    "data.prompt_column": "q",
    "data.answer_column": "a",
    "data.types": {},
    "data.chat_template_kwargs": {},
    "reward.functions": [{"builtin": "exact_match"}],
    "environment": {"path": "b"},
    "sampling.stop": [],
    "sampling.temperature": 0.5,
}
# The same, of keys that belong to other sections.
BESIDE_SECTIONS: dict[str, dict[str, Any]] = {
    "generation.segment_tokens": AGENT,
    "learner.mismatch_every": {"staleness.max_lag": 0},
    **{
        key: {
            "data.sources": [{"name": "s", "prompts": "p.jsonl", key.rpartition(".")[2]: value}],
            "data.prompts": None,
        }
        for key, value in OWN_VALUES.items()
    },
}
# Of keys that are off by default, in the order in which they are tried.
ON: tuple[Any, ...] = (
    *(True, 3, 0.5, "a", "end", "http://a:1", "0123456789", ["calculator"], ["a:443"], {"a": 1.0}),
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
    """Yield the key, its default, its owners and the values beside it, of every key that has owners."""
    for path, section in SECTIONS.items():
        for name in (*section.model_fields, *section.OWNED):
            *parents, last = (f"{path}.{name}" if path else name).split(".")
            if owners := owners_of(section, name):
                field = SECTIONS[".".join(parents)].model_fields[last]
                default = field.get_default(call_default_factory=True, validated_data={})
                key = ".".join([*parents, last])
                beside = (BESIDE_SECTIONS if name in section.OWNED else BESIDE).get(key, {})
                yield pytest.param(key, default, owners, beside, id=f"{path}.{name}")


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


@pytest.mark.parametrize(("key", "default", "owners", "beside"), owned_keys())
def test_a_key_without_its_owner_is_refused(
    key: str, default: Any, owners: tuple[Owner, ...], beside: dict[str, Any]
) -> None:
    without = key.rpartition(".")[0] if beside else ""
    is_off = isinstance(default, Section) or default in OFF
    errors = []
    for value in ON if is_off else (default,):
        with pytest.raises(InputError) as caught:
            parse_config(with_keys({key: value, **beside}, without=without), Path("/base"))
        errors.append(str(caught.value))
    assert any(owner.rule in error for owner in owners for error in errors), errors
    if is_off and not isinstance(default, Section):
        config = parse_config(with_keys({key: default, **beside}, without=without), Path("/base"))
        assert config, "a value that is off is taken anywhere"


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


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.stem)
def test_a_run_that_was_stored_with_the_keys_of_all_kinds_is_read(tmp_path: Path, file: Path) -> None:
    """Those without an effect are left out where they have their defaults, and named where they have not."""
    path, keys = tmp_path / "config.yaml", yaml.safe_load(file.read_text())
    path.write_text(yaml.safe_dump(keys))
    with pytest.raises(InputError, match="has no effect without"):
        read_config(path)
    (tmp_path / "environment.json").write_text("{}")
    config = read_config(path)
    write_config(config, path)
    assert read_config(path) == config
    path.write_text(yaml.safe_dump(keys | {"algorithm": keys["algorithm"] | {"overlong_penalty": 7.0}}))
    with pytest.raises(InputError, match=r"algorithm\.overlong_penalty: 7\.0 has no effect"):
        read_config(path)


def test_a_configuration_of_a_later_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(MINIMAL | {"format": 3}))
    with pytest.raises(InputError, match="has the format 3"):
        read_config(tmp_path / "config.yaml")


def test_an_environment_of_a_server_stores_the_keys_of_servers() -> None:
    assert EnvironmentConfig.model_validate({"path": "a.py", "entry": "Maze"}).model_dump()["entry"] == "Maze"
    environment = EnvironmentConfig(url="http://a:1")
    assert {"ping_every_s", "step_timeout_s"} <= environment.model_dump().keys()
    assert not {"entry", "memory_mb", "action_field"} & environment.model_dump().keys()
