"""A module of the tests as the program of a rank: `-m tests.support.training.rank_program MODULE WORDS...`.

An interpreter that ends beside the libraries' native threads may be aborted by them (exit code -6), after the module
has done its work. So a module that came to its end ends the process at once; one that failed ends it as usual.
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    """Run the module that the first word names."""
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
