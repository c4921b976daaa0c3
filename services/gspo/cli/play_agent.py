"""`gspo agent`: play the rollouts of a run with an agent of the user's."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import signal
import sys
from pathlib import Path

from rich.console import Console

from gspo.agents.worker import Agent, AgentWorker, RunUnreachableError
from gspo.cli.processes.exit_codes import EXIT_INTERRUPTED, RunError
from gspo.common.errors import InputError

_REPORT_EVERY_S = 30.0


def agent_worker(path: Path, entry: str, url: str, token_file: Path | None, rollouts: int, console: Console) -> int:
    """Play until the run ends, and print how many rollouts have ended how; the exit code.

    Raises:
        InputError: The file has no such function, or the token cannot be read.
        RunError: The gateway refuses the worker, or is away.
    """
    worker = AgentWorker(load_agent(path, entry), url, _token(token_file), rollouts)
    try:
        return asyncio.run(_run(worker, console))
    except* RunUnreachableError as errors:
        raise RunError(str(errors.exceptions[0])) from None


async def _run(worker: AgentWorker, console: Console) -> int:
    working = asyncio.create_task(worker.run())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, working.cancel)
    console.print(f"playing {worker.rollouts} rollouts at a time for {worker.url}", highlight=False)
    while not working.done():
        await asyncio.wait([working], timeout=_REPORT_EVERY_S)
        counts = ", ".join(f"{number} {how}" for how, number in worker.counts.items())
        console.print(f"rollouts: {counts}", highlight=False)
    if working.cancelled():
        console.print("stopped: unfinished rollouts go to other workers when their leases end", highlight=False)
        return EXIT_INTERRUPTED
    working.result()
    console.print("the run has ended", highlight=False)
    return 0


def load_agent(path: Path, entry: str) -> Agent:
    """The function of a file; modules beside the file can be imported.

    Raises:
        InputError: The file cannot be imported, or has no such function.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise InputError(str(path), "is no Python file", "Name a file with `async def play(task)`")
    sys.path.insert(0, str(path.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(str(path), f"cannot be imported ({type(error).__name__}: {error})", "Mend it") from error
    agent: Agent | None = getattr(module, entry, None)
    if agent is None or not inspect.iscoroutinefunction(agent):
        raise InputError(str(path), f"has no `async def {entry}(task)`", "Write one, or name another with --entry")
    return agent


def _token(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror})", "Give the run's token file") from error
