"""`gspo` in the process of a test: a fifth of the time of a process of its own.

Not for: Ctrl-C, commands that start services, imports.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from gspo.cli.__main__ import main


def gspo_here(*words: object, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Output, errors and exit code of `gspo WORDS`, with these variables beside the others."""
    arguments, output, errors = ["gspo", *map(str, words)], io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", arguments),
        redirect_stdout(output),
        redirect_stderr(errors),
    ):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())
