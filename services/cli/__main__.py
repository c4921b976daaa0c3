"""The command line: `gspo`.

It only turns errors into one message and an exit code; commands.py holds the commands.
"""

from __future__ import annotations

import sys

from services.cli.commands import app
from services.cli.outcome import EXIT_INTERRUPTED, InterruptedRunError, RunError
from services.common.errors import InputError
from services.common.runtime import exit_bad_input


def main() -> None:
    """Run one command."""
    try:
        app()
    except InputError as error:
        exit_bad_input(error)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except InterruptedRunError as stop:
        print(stop, file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
