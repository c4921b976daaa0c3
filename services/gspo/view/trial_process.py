"""The process that scores logged rollouts with a recorded version: `gspo reward compare`, one at a time.

consumes: a version of the log. produces: the scores, or why there are none. waits for: the process.
unblocked by: its end, or TRIAL_S.
"""

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from gspo.common.host.module_command import module_command

# The newest steps that are looked at, and rollouts of them, in whole groups.
STEPS, MAX_ROLLOUTS = 10, 200
TRIAL_S = 120.0
_INTERRUPT_S = 5.0
_MAX_ERROR_CHARS = 1000


class TrialError(Exception):
    """There are no scores; the message says why. `status` is that of HTTP."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class TrialProcess:
    """Scores rollouts of one run.

    Args:
        run_dir: The run's.
        timeout_s: Limit of a trial.
    """

    def __init__(self, run_dir: Path, timeout_s: float = TRIAL_S) -> None:
        self._run_dir, self.timeout_s = run_dir, timeout_s
        self._is_busy = False

    async def tried(self, version: str, function: str) -> list[dict[str, Any]]:
        """The rollouts as `gspo reward compare --json` prints them.

        Args:
            version: A whole version, as the log has it.
            function: The function whose scores it replaces.

        Raises:
            TrialError: Another trial runs, no sandbox can be started, the version cannot be used, or it is slow.
        """
        if self._is_busy:
            raise TrialError(409, f"another comparison is running; it ends within {self.timeout_s:g} s")
        self._is_busy = True
        try:
            return await self._run(version, function)
        finally:
            self._is_busy = False

    async def _run(self, version: str, function: str) -> list[dict[str, Any]]:
        options = (f"--function={function}", f"--steps={STEPS}", f"--rollouts={MAX_ROLLOUTS}", "--json")
        command = (*module_command("gspo.cli"), "reward", "compare", *options, "--", str(self._run_dir), version)
        # In a session of its own it can be ended together with the sandbox's process.
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self.timeout_s):
                output, errors = await process.communicate()
        except TimeoutError as error:
            text = f"the comparison took longer than {self.timeout_s:g} s; gspo reward compare takes fewer rollouts"
            raise TrialError(504, text) from error
        finally:
            await asyncio.shield(_end(process))
        if process.returncode:
            words = errors.decode(errors="replace").strip()[-_MAX_ERROR_CHARS:]
            raise TrialError(422, words.removeprefix("error: ") or f"it ended with code {process.returncode}")
        return list(json.loads(output))


async def _end(process: asyncio.subprocess.Process) -> None:
    """Interrupt what still runs, so that it closes its sandbox; kill it if that takes long."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(_INTERRUPT_S):
                await process.wait()
