"""One builder at a time for the op that DeepSpeed compiles at first use, and no waiting for one that was killed.

torch marks a build under way by a file and waits for its removal without end; a killed builder never removes it.
Here a lock that the system lets go with the process stands around the build, so a mark found under it is a dead one.
Neighbour: recovery.py starts DeepSpeed under it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Of torch.utils.cpp_extension: the folder of builds, and the mark of one under way.
_FOLDER_VARIABLE = "TORCH_EXTENSIONS_DIR"
_MARK = "lock"


@contextmanager
def one_builder() -> Iterator[None]:
    """Hold the folder of compiled ops, of our own by default, until the block ends."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = Path(os.environ.setdefault(_FOLDER_VARIABLE, str(cache / "gspo" / "torch_extensions")))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "builder").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for mark in folder.glob(f"*/{_MARK}"):
            mark.unlink()
        yield
