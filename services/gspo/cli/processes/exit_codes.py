"""Exit codes of `gspo`, the errors that lead to them beside InputError, and the exit codes of processes in words."""

import signal

from gspo.common.errors import EXIT_BAD_INPUT, EXIT_FAILED
from gspo.common.service.failure import ProcessFailure


class RunError(Exception):
    """The run cannot go on; the message says why, and where to look.

    Args:
        failure: That of the service that ended it, where its log has one.
    """

    exit_code = EXIT_FAILED

    def __init__(self, message: str, failure: ProcessFailure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


class ServiceRefusedError(RunError):
    """A service refuses the user's input; the message is the service's own."""

    exit_code = EXIT_BAD_INPUT


class NodeLostError(RunError):
    """A node on which the run depends is gone."""


class InterruptedRunError(Exception):
    """The user stopped the command by Ctrl-C."""


def describe_exit(code: int) -> str:
    """An exit code in words; a negative one is a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
