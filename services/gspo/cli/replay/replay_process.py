"""Runs the process of a replay, follows its log, and stops it: at the last step, at a difference, or at Ctrl-C."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gspo.cli.processes.exit_codes import InterruptedRunError, RunError, ServiceRefusedError, describe_exit
from gspo.common.errors import EXIT_BAD_INPUT, EXIT_START_AGAIN
from gspo.common.host.module_command import module_command

LOG_NAME = "replay.log"
_POLL_S = 0.1
_LAST_LINES = 5


class ReplayProcess:
    """One process, with its ranks.

    Args:
        folder: The replay's.
        arguments: After the folder.
        patience_s: How long it may take to stop after its present step.
        say: Shows a sentence to the user.
    """

    def __init__(self, folder: Path, arguments: list[str], patience_s: float, say: Callable[[str], None]) -> None:
        self._folder, self._arguments, self._patience_s, self._say = folder, arguments, patience_s, say
        self._log = folder / "services" / LOG_NAME
        self._deadline: float | None = None

    def run(self, is_enough: Callable[[], bool]) -> bool:
        """Run it to its end; it is stopped as soon as the steps so far are enough.

        Args:
            is_enough: Called often.

        Returns:
            Whether another process has to go on: a step ran out of memory, and is made with smaller micro-batches.

        Raises:
            ServiceRefusedError: It cannot work with its input.
            RunError: It failed.
            InterruptedRunError: The user stopped it; a call with the same arguments continues.
        """
        self._log.parent.mkdir(parents=True, exist_ok=True)
        began = self._log.stat().st_size if self._log.exists() else 0
        command = [*module_command("gspo.learner.replay"), str(self._folder), *self._arguments]
        with self._log.open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
        # A command in the background of a script begins with SIGINT ignored, so Python has no handler for it.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        is_interrupted, is_over = False, False
        try:
            while True:
                try:
                    if process.poll() is not None:
                        break
                    if not is_over and is_enough():
                        is_over = True
                        self._stop(process)
                    if self._deadline is not None and time.monotonic() > self._deadline:
                        _kill(process)
                    time.sleep(_POLL_S)
                except KeyboardInterrupt:
                    if is_interrupted:
                        _kill(process)
                    is_interrupted = is_over = True
                    self._say("stopping after this step, with a checkpoint; Ctrl-C again stops at once")
                    self._stop(process)
        finally:
            _kill(process)
            process.wait()
            self._stop(process)
        is_enough()
        if is_interrupted:
            raise InterruptedRunError("stopped; the same command continues it")
        if is_over or process.returncode == 0:
            return False
        if process.returncode != EXIT_START_AGAIN:
            raise self._error(process.returncode, began)
        return True

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        """Ask it to stop after its present step: that is the end of its standard input."""
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        if self._deadline is None:
            self._deadline = time.monotonic() + self._patience_s

    def _error(self, code: int, began: int) -> RunError:
        with self._log.open("rb") as log:
            log.seek(began)
            lines = log.read().decode(errors="replace").splitlines()
        if errors := [line for line in lines if line.startswith("error: ")]:
            error = ServiceRefusedError if code == EXIT_BAD_INPUT else RunError
            return error(errors[-1].removeprefix("error: "))
        last = "\n".join(lines[-_LAST_LINES:])
        return RunError(f"the replay ended with {describe_exit(code)}. Its log is {self._log}; the last lines:\n{last}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill it with its ranks; nothing where it has ended."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
