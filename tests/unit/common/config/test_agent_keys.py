"""The section `agent`: what it needs, what contradicts it, and what rewards its rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo.cli.processes.programs import process_names, services_of
from gspo.common.config.loading import parse_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.reward_uses import reward_uses

REWARD = {"functions": [{"path": "reward.py", "weight": 0.5}]}


def parsed(agent: dict[str, Any], **sections: Any) -> Config:
    keys = {"name": "test", "model": {"path": "m"}, "data": {"prompts": "p.jsonl"}, "run": {"total_steps": 1}}
    return parse_config({**keys, "gateway": {"replicas": 1}, "agent": agent, **sections}, base=Path("/base"))


def refused(agent: dict[str, Any], **sections: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        parsed(agent, **sections)
    return caught.value


def parts(config: Config) -> list[tuple[str, float]]:
    (source,) = config.sources
    uses = reward_uses(source)
    assert source.part_labels == [use.name for use in uses]
    return [(use.name, use.weight) for use in uses]


def test_the_agent_the_functions_or_both_reward() -> None:
    assert parts(parsed({"external": True})) == [("agent", 1.0)]
    assert parts(parsed({"external": True, "weight": 2.0}, reward=REWARD)) == [("reward", 0.5), ("agent", 2.0)]
    assert parts(parsed({"external": True, "weight": None}, reward=REWARD)) == [("reward", 0.5)]
    assert refused({"external": True, "weight": None}).where == "reward.functions"


@pytest.mark.parametrize(
    ("sections", "where"),
    [
        ({"gateway": {}}, "gateway.replicas"),
        ({"environment": {"path": "game.py"}}, "environment"),
        ({"sampling": {"stop": ["x"]}}, "sampling.stop"),
        ({"staleness": {"group_deadline_s": 100.0}}, "agent.timeout_s"),
    ],
)
def test_contradictions_name_the_key(sections: dict[str, Any], where: str) -> None:
    error = refused({"external": True}, **sections)
    assert error.where == where
    assert "agent" in f"{error.where} {error.rule}"


def test_conversations_of_agents_have_turns() -> None:
    by_turn = {"algorithm": {"loss_agg_mode": "seq-mean-token-sum-turn-norm"}}
    assert parsed({"external": True}, **by_turn).agent.used
    assert refused({}, reward=REWARD, **by_turn).where == "algorithm.loss_agg_mode"


def test_an_agent_is_of_one_kind() -> None:
    config = parsed({"path": "agent.py", "entry": "go", "reads": ["a.txt"], "workers": 3, "memory_mb": 64}).agent
    assert (config.used, config.is_started, config.path) == (True, True, Path("/base/agent.py"))
    assert config.reads == (Path("/base/a.txt"),)
    assert parsed({"command": ["node", "agent.mjs"]}).agent.is_started
    assert not parsed({"external": True}).agent.is_started


@pytest.mark.parametrize("host", ["example.org:443", "localhost:80", "127.0.0.1:8000", "search-1:65535"])
def test_hosts_are_named_with_their_ports(host: str) -> None:
    assert parsed({"path": "agent.py", "hosts": [host]}).agent.hosts == (host,)


@pytest.mark.parametrize(
    ("host", "rule"),
    [
        ("example.org", "is not HOST:PORT"),
        ("example.org:0", "is not HOST:PORT"),
        ("example.org:65536", "is not HOST:PORT"),
        ("https://example.org:443", "is not HOST:PORT"),
        ("[::1]:80", "is not HOST:PORT"),
        ("10.0.0.1:80", "has an address in place of a name"),
    ],
)
def test_other_hosts_are_refused(host: str, rule: str) -> None:
    error = refused({"path": "agent.py", "hosts": ["localhost:1", host]})
    assert error.where == "agent.hosts.1"
    assert rule in error.rule


def test_the_run_starts_the_service_of_its_agents() -> None:
    assert process_names(config := parsed({"path": "agent.py"}), services_of(config))[-2:] == ["gateway-0", "agents-0"]
    assert "agents" not in services_of(parsed({"external": True}))
