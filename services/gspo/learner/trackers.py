"""The processes that send a run's metrics to TensorBoard and Weights & Biases; the learner never waits for them.

Each reads the run directory. The learner starts and restarts them, and at the end lets them send the rest.
"""

import asyncio
import netrc
import os
from asyncio.subprocess import DEVNULL, PIPE, Process
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from gspo.common.config.evaluation import TrackingConfig
from gspo.common.errors import InputError
from gspo.common.host.module_command import module_command
from gspo.common.telemetry import metrics

MAX_RESTARTS = 5
_FIRST_PAUSE_S = 2.0
# Less than the time that the command line leaves a service to end.
FINISH_S = 8.0
# Tracker -> its key, the package that it imports, and the extra that installs it.
_NEEDS = {
    "tensorboard": ("tracking.tensorboard", "tensorboardX", "gspo[tensorboard]"),
    "wandb": ("tracking.wandb.project", "wandb", "gspo[wandb]"),
}
_WANDB_URL = "https://api.wandb.ai"
log = structlog.get_logger()


def check_trackers(config: TrackingConfig) -> None:
    """Refuse a tracker that cannot work here.

    Raises:
        InputError: Its package is not installed, or its service needs a key that is missing.
    """
    for name in config.names:
        key, package, extra = _NEEDS[name]
        if find_spec(package) is None:
            raise InputError(key, f"needs the package {package}, which is not installed", f"pip install '{extra}'")
    if config.wandb.project and config.wandb.mode == "online" and not _wandb_key_is_there():
        raise InputError(
            "tracking.wandb.mode",
            "online needs a key, and there is none in WANDB_API_KEY or ~/.netrc",
            "Call `wandb login`, or set mode: offline and call `wandb sync` later",
        )


def _wandb_key_is_there() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", _WANDB_URL)).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class Trackers:
    """Keeps a process for each tracker that the configuration asks for."""

    def __init__(self, config: TrackingConfig, run_dir: Path) -> None:
        self._names, self._run_dir = config.names, run_dir
        self._processes: dict[str, Process] = {}

    async def run(self) -> None:
        """Keep them until cancelled; one that keeps ending is given up, and the training continues without it."""
        await asyncio.gather(*(self._keep(name) for name in self._names))
        await asyncio.Event().wait()

    async def finish(self) -> None:
        """Let them send the recorded rest for at most FINISH_S, and end them."""
        await asyncio.gather(*(self._finish(name, process) for name, process in self._processes.items()))

    async def _keep(self, name: str) -> None:
        for attempt in range(1 + MAX_RESTARTS):
            process = self._processes[name] = await asyncio.create_subprocess_exec(
                *module_command("gspo.tracking"), str(self._run_dir), name, stdin=PIPE, stdout=DEVNULL
            )
            metrics.TRACKER_UP.labels(name).set(1)
            code = await process.wait()
            metrics.TRACKER_UP.labels(name).set(0)
            log.warning("tracker_ended", tracker=name, exit_code=code, restarts_left=MAX_RESTARTS - attempt)
            if attempt < MAX_RESTARTS:
                await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt)
        log.error("tracker_given_up", tracker=name, reason="it keeps ending; the next start sends the rest of the log")

    async def _finish(self, name: str, process: Process) -> None:
        if process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(FINISH_S):
                await process.wait()
        except TimeoutError:
            log.warning("tracker_killed", tracker=name, reason=f"it was not done {FINISH_S:g} s after the run's end")
            process.kill()
            await process.wait()
