"""The program `gspo`: runs a command of commands.py and turns errors into one message and an exit code."""

import errno
import io
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from gspo.common.host.packages import checked_packages

with checked_packages():
    from gspo.cli.commands import app
    from gspo.cli.processes.exit_codes import InterruptedRunError, RunError
    from gspo.common.errors import EXIT_FAILED, EXIT_INTERRUPTED, InputError, exit_bad_input

_FULL = (errno.ENOSPC, errno.EDQUOT)
# The message of Path.resolve until Python 3.13.
_LINK_LOOP = "Symlink loop from "


def main() -> None:
    """Run one command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal, or a pipe, that has not every character
            stream.reconfigure(errors="backslashreplace")
    try:
        for word in sys.argv[1:]:
            if word.encode(errors="replace").decode() != word:
                raise InputError(word, "is not UTF-8, and configurations and logs are", "Rename the file")
        app()
    except InputError as error:
        exit_bad_input(error)
    except OSError as error:
        if error.errno in _FULL:
            print(f"error: {error}. Free some, or name a folder on another disk", file=sys.stderr)
            sys.exit(EXIT_FAILED)
        exit_bad_input(_refusal(error, sys.argv[1:]))
    except RuntimeError as error:
        exit_bad_input(_of_link(error))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except InterruptedRunError as stop:
        print(stop, file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _of_link(error: RuntimeError) -> InputError:
    """The message about a link that leads to itself; raises any other error."""
    path = str(error).removeprefix(_LINK_LOOP)
    if path == str(error):
        raise error
    return InputError(path.strip("'"), "is a link that leads back to itself", "Remove it, or give another path")


def _refusal(error: OSError, words: Sequence[str]) -> InputError:
    """The message about a path of the command line that cannot be used; raises any other error of the system."""
    if isinstance(error, shutil.Error):  # of a folder: (source, target, why) of each file
        _, path, why = error.args[0][0]
        return InputError(path, f"cannot be written ({why})", "Give another path, or check this one")
    if not isinstance(error.filename, str | Path):
        raise error
    # A command may have followed links, or made a relative path absolute.
    path, *named = (
        Path(os.path.realpath(name)) for name in (error.filename, *(word.partition("=")[2] or word for word in words))
    )
    if path.name.startswith(".") and path.suffix == ".tmp":  # a folder beside the one that it becomes
        path = path.with_name(path.stem[1:])
    if not any(path == other or other in path.parents or path in other.parents for other in named):
        raise error
    return InputError(str(error.filename), f"cannot be used ({error.strerror})", "Give another path, or check this one")


if __name__ == "__main__":
    main()
