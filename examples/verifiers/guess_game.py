"""The guessing game as an environment of verifiers': its tasks with their reward, the game's side, and its harness."""

import sys
from pathlib import Path

import verifiers.v1 as vf
from openai import AsyncOpenAI

sys.path.append(str(Path(__file__).resolve().parents[1] / "guess"))

from game import HIGHEST, MAX_TURNS, reset, step

__all__ = ["ChatHarness", "GuessEnv", "GuessTaskset"]


class Number(vf.TaskData):
    """A number to find."""

    number: int


class GuessTask(vf.Task[Number]):
    """One game. Its reward is that of the turns that the policy wrote."""

    @vf.reward(weight=1.0)
    async def rapid_success(self, trace: vf.Trace) -> float:
        """1 for a right first guess, a sixteenth less for each further one, 0 without one."""
        state, total = reset({"number": self.data.number})[0], 0.0
        for message in trace.assistant_messages:
            state, _, reward, _ = step(state, (message.content or "").strip())
            total += reward
        return total


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    """A game for each number."""

    def load(self) -> list[GuessTask]:
        """The tasks, in the order of their numbers."""
        prompt = f"Guess a number from 0 to {HIGHEST}."
        return [GuessTask(Number(prompt=prompt, number=number), self.config.task) for number in range(HIGHEST + 1)]


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """One call of the policy a segment, from this process; verifiers' `null` starts a program for each."""

    APPENDS_SYSTEM_PROMPT, SUPPORTS_RESUME, EXECUTES_CODE, NEEDS_CONTAINER = True, True, False, False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Ask for the next turn of the conversation so far; verifiers records it on the way."""
        prompt = data.prompt
        messages = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [{"role": message.role, "content": message.content} for message in prompt or []]
        )
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class GuessEnvConfig(vf.EnvConfig):
    """The one player: the policy."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig(), max_turns=MAX_TURNS)


class GuessEnv(vf.Env[GuessEnvConfig]):
    """The game's side of the conversation."""

    async def run(self, task: GuessTask, agents: vf.Agents) -> None:
        """Answer each guess until the right one, or the last turn."""
        state = reset({"number": task.data.number})[0]
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn()
            while not segment.terminated:
                state, hint, _, done = step(state, segment.last_reply)
                if done:
                    break
                segment = await talk.turn(hint)
