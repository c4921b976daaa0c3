"""The service of agents in a container of its own: `python -m tests.compose` plays a small run with it.

The run has a random model, which learns nothing. The images are built before.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.compose.project import ComposeProject, report_progress, until
from tests.compose.refusals import said
from tests.support.tiny_model import make_tiny_model

# It tries to reach what only its service may, and gives a reward that differs between answers.
AGENT = """
import socket
from openai import AsyncOpenAI

def reached(host, port):
    try:
        socket.create_connection((host, port), 3).close()
    except OSError:
        return False
    return True

async def play(task):
    outside = [name for name in ("redis", "coordinator", "1.1.1.1") if reached(name, 6379 if name == "redis" else 443)]
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        reply = await client.chat.completions.create(model=task.model, messages=task.messages, max_tokens=4)
    print("reached", outside)
    return float(len(reply.choices[0].message.content or "") % 2)
"""
STEPS = 2


def input_folder(folder: Path) -> Path:
    """The folder of a small run whose agent plays its rollouts."""
    make_tiny_model(folder / "model", seed=1)
    (folder / "agent.py").write_text(AGENT)
    rows = [{"prompt": [{"role": "user", "content": f"{number}+1="}]} for number in range(16)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: dict[str, Any] = {
        "name": "agents",
        "model": {"path": "model"},
        "data": {"prompts": "prompts.jsonl"},
        "agent": {"path": "agent.py", "workers": 2, "memory_mb": 512},
        "gateway": {"replicas": 1},
        "algorithm": {
            "rollout_batch_size": 4,
            "num_return_sequences_in_group": 4,
            "prompt_length": 64,
            "response_length": 64,
        },
        "generation": {"kv_cache_gb": 0.25, "threads": 1},
        "learner": {"threads": 1},
        "run": {"total_steps": STEPS},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def agents_play(house: ComposeProject, start_s: float) -> None:
    """Agents in two containers play a run to its end, in sandboxes that reach the gateway alone."""
    docker = house.docker
    services = ["coordinator", "reward", "generation", "learner", "gateway", "agents"]
    line = "docker compose --profile agents up -d --build"
    house.as_documented(line, "--scale", "agents=2", *services, timeout_s=start_s)

    def ended() -> dict[str, int] | None:
        containers = [container for service in services for container in docker.containers(service)]
        states = {container: docker.inspect(container)["State"] for container in containers}
        if any(state["Running"] for state in states.values()):
            return None
        return {container: state["ExitCode"] for container, state in states.items()}

    codes = until("the end of the run of agents", ended, start_s)
    assert set(codes.values()) == {0}, f"exit codes {codes}"
    containers = docker.containers("agents")
    levels = [line["confinement"] for container in containers for line in said(docker, container, "sandbox")]
    assert levels == ["bubblewrap"] * 2, levels
    outputs = [line for container in containers for line in said(docker, container, "agent_output")]
    lines = [line["line"] for line in outputs]
    assert len(lines) >= STEPS * 4 * 4, f"{len(lines)} rollouts were played"
    assert set(lines) == {"reached []"}, f"an agent reached more than the gateway: {set(lines)}"
    report_progress(f"two services of agents played {len(lines)} rollouts in sandboxes")
