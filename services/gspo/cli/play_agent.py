"""`gspo agent`: play the rollouts of a run with an agent of the user's."""

import asyncio
import signal
import sys
from pathlib import Path

from rich.console import Console

from gspo.agents.player.loading import UnfitAgentError, load_agent
from gspo.agents.player.task import Agent
from gspo.agents.worker import AgentWorker, RunUnreachableError
from gspo.cli.processes.exit_codes import RunError
from gspo.common.errors import EXIT_INTERRUPTED, InputError

_REPORT_EVERY_S = 30.0


def agent_worker(path: Path, entry: str, url: str, token_file: Path | None, rollouts: int, console: Console) -> int:
    """Play until the run ends, and print how many rollouts have ended how; the exit code.

    Raises:
        InputError: The file has no such function, or the token cannot be read.
        RunError: The gateway refuses the worker, or is away.
    """
    worker = AgentWorker(_load(path, entry), url, _token(token_file), rollouts)
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


def _load(path: Path, entry: str) -> Agent:
    """The function of a file; modules beside the file can be imported.

    Raises:
        InputError: The file cannot be imported, or has no such function.
    """
    sys.path.insert(0, str(path.resolve().parent))
    try:
        return load_agent(path, entry)
    except UnfitAgentError as error:
        raise InputError(str(path), str(error), error.fix) from error


def _token(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror})", "Give the run's token file") from error
