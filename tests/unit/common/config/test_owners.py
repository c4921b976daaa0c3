"""Every key that belongs to others is refused where they are absent, also with its default; stored runs have none."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from gspo.common.config.fields import Section, owners_of
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
# Values of other kinds than a section's first: without them its keys would have their owner, or none at all.
BESIDE: dict[str, dict[str, Any]] = {
    "algorithm.gamma": {"adv_estimator": "rloo"},
    "algorithm.ratio_of": {"preset": "grpo"},
    "algorithm.pg_clip_reference_length": {"objective": "cispo"},
    "environment.entry": {"url": "http://b:1"},
    "environment.memory_mb": {"url": "http://b:1"},
    "environment.mcp.reads": {"url": "http://b:1"},
    "environment.mcp.memory_mb": {"url": "http://b:1"},
    "environment.weight": {"mcp": {"url": "http://a:1"}},
    "environment.step_timeout_s": {"mcp": {"url": "http://a:1"}},
    "environment.reads": {"url": "http://b:1"},
    "reward.functions.0.entry": {"builtin": "exact_match"},
    "reward.functions.0.version": {"builtin": "exact_match"},
    "teacher.trust_remote_code": {"address": "http://a:1", "model": "t"},
    "teacher.allow_pickle": {"address": "http://a:1", "model": "t"},
}
# Of keys that are off by default, in the order in which they are tried.
ON: tuple[Any, ...] = (True, 3, 0.5, "a", "http://a:1", "0123456789", ["calculator"], ["a:443"], {"a": 1.0})


def sections(section: type[Section], path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield the sections of a configuration by their keys; of a list the first member."""
    yield path, section
    for name, field in section.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                part = f"{name}.0" if kind is RewardFunction else name
                yield from sections(kind, f"{path}.{part}" if path else part)


def owned_keys() -> Iterator[Any]:
    """Yield the key, its default and the owners of every key that has some."""
    for path, section in sections(Config):
        if path.startswith("data.sources"):
            continue  # as in the sections that a source replaces
        for name, field in section.model_fields.items():
            if owners := owners_of(section, name):
                default = field.get_default(call_default_factory=True, validated_data={})
                yield pytest.param(f"{path}.{name}", default, [owner.text for owner in owners], id=f"{path}.{name}")


def with_key(key: str, value: Any) -> dict[str, Any]:
    """The minimal configuration with a key, and others beside it."""
    path, _, name = key.rpartition(".")
    keys = deepcopy(MINIMAL)
    place: Any = keys
    for part in path.split("."):
        place = place[0] if part == "0" else place.setdefault(part, {})
    if key in BESIDE:
        place.clear()
    place |= BESIDE.get(key, {}) | {name: value}
    return keys


@pytest.mark.parametrize(("key", "default", "owners"), owned_keys())
def test_a_key_without_its_owner_is_refused(key: str, default: Any, owners: list[str]) -> None:
    values = (default,) if default not in (None, False, (), {}, "") else ON
    errors = []
    for value in values:
        with pytest.raises(InputError) as caught:
            parse_config(with_key(key, value), Path("/base"))
        errors.append(str(caught.value))
    assert any(f"has no effect without {owner}" in error for owner in owners for error in errors), errors
    if len(values) > 1:
        assert parse_config(with_key(key, default), Path("/base")), "a value that is off is taken anywhere"


def test_a_switch_that_is_written_as_off_keeps_its_keys() -> None:
    """ROLL's own form."""
    keys = deepcopy(MINIMAL) | {"algorithm": {"use_kl_loss": False, "kl_loss_coef": 0.1, "kl_kind": "k1"}}
    algorithm = parse_config(keys, Path("/base")).algorithm
    assert (algorithm.use_kl_loss, algorithm.kl_loss_coef) == (False, 0.1)


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
