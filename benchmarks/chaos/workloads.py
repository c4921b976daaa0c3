"""The runs that faults strike: a simulated one, and two with the real engines, of conversations and of agents.

The last two have a random model of tests/support/tiny_model.py, whose answers mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos.schedule import PROCESSES, Processes, kinds

# Both hang while a file is there: `reads` lets the sandbox see it.
_HANG = """
import os, time
def hang():
    if os.path.exists({file!r}):
        time.sleep(3600)
"""
_REWARD = (
    _HANG
    + """
def reward(prompts, completions, **columns):
    hang()
    return [float(c[0]["content"][:1] < "P") for c in completions]
"""
)
_ENVIRONMENT = (
    _HANG
    + """
def reset(task):
    return {{"turns": 0}}, ""

def step(state, action):
    hang()
    turns = state["turns"] + 1
    return {{"turns": turns}}, "Go on.", float(action[:1] < "P"), turns == 3
"""
)
# Some of its conversations begin a branch.
_AGENT = """
from openai import AsyncOpenAI

async def play(task):
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=20, timeout=60.0) as client:
        messages, reward = list(task.messages), 0.0
        for _ in range(3):
            reply = await client.chat.completions.create(model=task.model, messages=messages)
            text = reply.choices[0].message.content or ""
            reward += float(text[:1] < "P")
            messages += [{{"role": "assistant", "content": text}}, {{"role": "user", "content": "Go on."}}]
            if len(text) % 4 == 0:
                messages = [{{"role": "user", "content": "A summary."}}]
        return reward
"""


@dataclass(frozen=True)
class Workload:
    """A run to strike.

    Attributes:
        is_simulated: Engine and training step are simulated, and each process has its own network namespace.
        files: Code of its user, by name; `{file!r}` stands for the file of the fault `hang`.
        sections: Those of the configuration, whose keys go over those of target.py.
        recovery_s: Longest time from the end of a fault until the run is well.
    """

    name: str
    title: str
    processes: Processes
    is_simulated: bool
    recovery_s: float
    files: Mapping[str, str] = field(default_factory=lambda: {"reward.py": _REWARD})
    sections: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def kinds(self, *, is_root: bool) -> list[str]:
        """The kinds of faults that can strike it."""
        return kinds(self.processes, cuts=is_root and self.is_simulated, disks=is_root)


SIMULATED = Workload("simulated", "simulated", PROCESSES, is_simulated=True, recovery_s=120.0)
# An engine that starts on a busy machine takes minutes of it.
_ENGINES_RECOVERY_S = 600.0
_SINGLE: Processes = {**PROCESSES, "generation": ("generation-0",)}
_ENGINES: dict[str, dict[str, Any]] = {
    "algorithm": {
        "preset": "dr-grpo",
        "old_logprobs": "recompute",
        "behavior_correction": "truncate",
        "behavior_level": "product",
        "rollout_batch_size": 4,
        "num_return_sequences_in_group": 4,
        "prompt_length": 64,
        "response_length": 256,
        "num_mini_batches": 1,
        "max_refill": 1000,
    },
    "staleness": {"max_lag": 1, "group_deadline_s": 120.0, "max_attempts": 5},
    "generation": {"replicas": 1, "max_rollouts": 32, "push_timeout_s": 30.0, "kv_cache_gb": 0.1, "threads": 1},
    "learner": {"learning_rate": 1e-3, "threads": 1},
}
CONVERSATIONS = Workload(
    "conversations",
    "conversations, real engines",
    _SINGLE,
    is_simulated=False,
    recovery_s=_ENGINES_RECOVERY_S,
    files={"reward.py": _REWARD, "environment.py": _ENVIRONMENT},
    sections={
        **_ENGINES,
        "environment": {"path": "environment.py", "reads": ["faults"], "max_turns": 4, "turn_tokens": 12},
    },
)
AGENTS = Workload(
    "agents",
    "agents, real engines",
    {**_SINGLE, "gateway": ("gateway-0",), "agents": ("agents-0",)},
    is_simulated=False,
    recovery_s=_ENGINES_RECOVERY_S,
    files={"reward.py": _REWARD, "agent.py": _AGENT},
    sections={
        **_ENGINES,
        "algorithm": {**_ENGINES["algorithm"], "rollout_length": 1024},
        "gateway": {"replicas": 1},
        "agent": {
            "path": "agent.py",
            "workers": 8,
            "memory_mb": 512,
            "answer_tokens": 12,
            "lease_s": 10.0,
            "timeout_s": 100.0,
        },
    },
)
WORKLOADS = {workload.name: workload for workload in (SIMULATED, CONVERSATIONS, AGENTS)}
