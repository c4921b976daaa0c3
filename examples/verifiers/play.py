"""Plays the rollouts of a run with an environment of verifiers', as an external agent (`agent.external: true`).

    python play.py guess_game --write-prompts prompts.jsonl               the environment's tasks as the run's prompts
    python play.py guess_game --url http://127.0.0.1:8082 --rollouts 16   beside the run, until it ends

It needs verifiers' packages, and of gspo's the files of the worker alone, which import no engine. Each rollout is an
episode of the environment. Its calls go to the gateway with the key of the rollout; its reward is the sum of the
rewards of its traces that are to be trained.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

# gspo's packages are not installed here, and the worker needs none of them.
sys.path.append(str(Path(__file__).resolve().parents[2] / "services"))

from gspo.agents.player.task import Task
from gspo.agents.worker import AgentFailedError, AgentWorker, RunUnreachableError

TASK_COLUMN = "verifiers_task"
log = logging.getLogger(__name__)


class EpisodePlayer:
    """Plays each rollout as one episode of an environment.

    Args:
        environment: That of verifiers'.
    """

    def __init__(self, environment: vf.Env) -> None:
        self._environment = environment
        self._tasks = {task.data.idx: task for task in environment.taskset}

    async def play(self, rollout: Task) -> float:
        """The reward of the rollout's episode.

        Raises:
            AgentFailedError: The episode has failed.
        """
        # verifiers takes keys from the environment's variables alone; each rollout has its own.
        variable = f"GSPO_ROLLOUT_API_KEY_{rollout.api_key.encode().hex()}"
        os.environ[variable] = rollout.api_key
        client = vf.EvalClientConfig(base_url=rollout.base_url, api_key_var=variable)
        try:
            context = vf.ModelContext(model=rollout.model, client=client, sampling=vf.Sampling())
            episode = await self._environment.run_episode(self._tasks[rollout.columns[TASK_COLUMN]], context)
        finally:
            del os.environ[variable]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            text = "; ".join(f"{error.type}: {error.message}" for error in errors)
            log.warning("the episode of rollout %s failed: %s", rollout.id, text)
            raise AgentFailedError("exception", text)
        return sum(trace.reward for trace in episode.traces if trace.agent is None or trace.agent.trainable)


def main() -> int:
    """The command line; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("taskset", help="Module of the environment, such as guess_game or an installed one's")
    parser.add_argument("--harness", help="verifiers' harness for the policy; the environment's own by default")
    parser.add_argument("--write-prompts", type=Path, metavar="FILE", help="Write the run's prompts, and end")
    parser.add_argument("--url", help="Address of the run's gateway; `gspo status` prints it")
    parser.add_argument("--token-file", type=Path, help="The run's services.token_file")
    parser.add_argument("--rollouts", type=int, default=8, help="Rollouts at a time")
    options = parser.parse_args()
    if not options.url and not options.write_prompts:
        parser.error("give --url of the run's gateway, or --write-prompts")
    if options.token_file and not options.token_file.is_file():
        parser.error(f"--token-file: {options.token_file} is no file. Give the run's services.token_file")
    environment = load(options.taskset, options.harness)
    if options.write_prompts:
        write_prompts(environment, options.write_prompts)
        return 0
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    token = options.token_file.read_text().strip() if options.token_file else ""
    return asyncio.run(work(environment, options.url, token, options.rollouts))


def load(taskset: str, harness: str | None) -> vf.Env:
    """The environment, whose policy runs without a container, as its taskset says or by another harness."""
    agent: dict[str, Any] = {"runtime": {"type": "subprocess"}} | ({"harness": {"id": harness}} if harness else {})
    return vf.load_environment(vf.resolve_env_config({"taskset": {"id": taskset}, "agent": agent}))


def write_prompts(environment: vf.Env, path: Path) -> None:
    """One line a task: its prompt as messages, and its number."""
    rows = []
    for task in environment.taskset:
        prompt = task.data.prompt or ""
        messages = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [message.model_dump(exclude_none=True) for message in prompt]
        )
        if task.data.system_prompt:
            messages.insert(0, {"role": "system", "content": task.data.system_prompt})
        rows.append({"prompt": messages, TASK_COLUMN: task.data.idx})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} prompts")


async def work(environment: vf.Env, url: str, token: str, rollouts: int) -> int:
    """Play until the run ends; the exit code."""
    async with environment.serving():
        worker = AgentWorker(EpisodePlayer(environment).play, url, token, rollouts)
        playing = asyncio.create_task(worker.run())
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, playing.cancel)
        print(f"playing {rollouts} rollouts at a time for {url}", flush=True)
        await asyncio.wait([playing])
    print(", ".join(f"{number} {how}" for how, number in worker.counts.items()))
    if playing.cancelled():
        print("stopped: unfinished rollouts go to other workers when their leases end")
        return 130
    if (error := playing.exception()) is not None:
        unreachable = error.subgroup(RunUnreachableError) if isinstance(error, BaseExceptionGroup) else None
        if unreachable is None:
            raise error
        print(f"error: {unreachable.exceptions[0]}", file=sys.stderr)
        return 1
    print("the run has ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
