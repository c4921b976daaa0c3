"""How a command ends when it does not end well, beside InputError: what could not go on, and the exit code.

No message is formatted for people elsewhere than where it is raised. Neighbour: __main__.py prints and exits.
"""

from __future__ import annotations

from gspo.common.errors import EXIT_BAD_INPUT, EXIT_FAILED

EXIT_INTERRUPTED = 130


class RunError(Exception):
    """The run cannot go on; the message says why, and where to look."""

    exit_code = EXIT_FAILED


class ServiceRefusedError(RunError):
    """A service refuses what the user gave; the message is the service's own."""

    exit_code = EXIT_BAD_INPUT


class InterruptedRunError(Exception):
    """The user pressed Ctrl-C before anything was started."""
