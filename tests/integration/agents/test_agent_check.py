"""The check of an agent before the start, in its real sandbox: each refusal names the key, the rule and the fix."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest

from gspo.agents.check import check
from gspo.common.config.loading import parse_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.reward.sandbox import syscalls

pytestmark = pytest.mark.timeout(120)


def agent_file(folder: Path, source: str) -> Path:
    path = folder / "agent.py"
    path.write_text(textwrap.dedent(source))
    return path


def config_of(agent: dict[str, Any], base: Path, **sections: Any) -> Config:
    keys = {"name": "test", "model": {"path": "m"}, "data": {"prompts": "p.jsonl"}, "run": {"total_steps": 1}}
    return parse_config({**keys, "gateway": {"replicas": 1}, "agent": agent, **sections}, base=base)


def refused(agent: dict[str, Any], base: Path, **sections: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        check(config_of(agent, base, **sections))
    return caught.value


@pytest.mark.parametrize(
    ("source", "agent", "where", "text"),
    [
        (None, {}, "agent.path", "does not exist"),
        ("import helpers\nasync def play(task): ...", {}, "agent.path", "No module named 'helpers'"),
        ("import os\nos.kill(os.getpid(), 9)", {}, "agent.path", "does not start"),
        ("def play(task): ...", {}, "agent.path", r"has no `async def play\(task\)`"),
        ("async def play(task): ...", {"entry": "other"}, "agent.path", r"has no `async def other\(task\)`"),
        ("async def play(task): ...", {"reads": ["no.txt"]}, "agent.reads.0", "does not exist"),
        ("async def play(task): ...", {"reads": ["agent.py", "sub/agent.py"]}, "agent.reads", "agent.py"),
        (
            None,
            {"path": None, "command": ["no-such-program"]},
            "agent.command.0",
            "names a program that the sandbox does not have",
        ),
    ],
)
def test_an_agent_that_cannot_play_is_refused_before_the_start(
    tmp_path: Path, source: str | None, agent: dict[str, Any], where: str, text: str
) -> None:
    (tmp_path / "helpers.py").write_text("")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "agent.py").write_text("")
    if source is not None:
        agent_file(tmp_path, source)
    keys = {key: value for key, value in ({"path": "agent.py"} | agent).items() if value is not None}
    error = refused(keys, tmp_path)
    assert error.where == where
    assert re.search(text, str(error)), error


def test_an_agent_that_can_play_passes_with_the_files_that_it_may_read(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text("NAME = 'x'")
    path = agent_file(tmp_path, "import helpers, openai\nassert helpers.NAME\nasync def other(task): ...\n")
    check(config_of({"path": str(path), "entry": "other", "reads": ["helpers.py"]}, tmp_path))


def test_a_machine_without_namespaces_is_refused_as_for_reward_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent_file(tmp_path, "async def play(task): ...")
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    error = refused({"path": "agent.py"}, tmp_path)
    assert error.where == "reward.sandbox_minimum"
    assert error.rule.startswith(
        "is landlock, and this machine reaches rlimits for agents and MCP servers: bubblewrap: there is no "
    )
    check(config_of({"path": "agent.py"}, tmp_path, reward={"sandbox_minimum": "rlimits"}))


def test_a_machine_without_seccomp_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> bytes:
        raise syscalls.FilterUnavailableError("libseccomp cannot be loaded")

    agent_file(tmp_path, "async def play(task): ...")
    monkeypatch.setattr(syscalls, "agent_filter_bytes", missing)
    assert "libseccomp cannot be loaded" in refused({"path": "agent.py"}, tmp_path).rule


@pytest.mark.parametrize(("agent", "text"), [({}, "there is no agent"), ({"external": True}, "started elsewhere")])
def test_a_run_whose_agent_nobody_starts_here_is_refused(tmp_path: Path, agent: dict[str, Any], text: str) -> None:
    error = refused(agent, tmp_path, reward={"functions": [{"path": "reward.py"}]})
    assert error.where == "agent"
    assert text in str(error)
