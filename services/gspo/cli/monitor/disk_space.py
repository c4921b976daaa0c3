"""Whether the disk of a run has room: a full one holds everything up, Redis with it, so nobody else may get to say it.

It makes no room.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

from gspo.cli.monitor.view import ScreenLine

LEAST_BYTES = 1 << 20
_LOOK_S = 2.0


def disk_full_message(run_dir: Path) -> str:
    """What a reader should know of a full disk; empty while there is room."""
    free = shutil.disk_usage(run_dir).free
    if free >= LEAST_BYTES:
        return ""
    return (
        f"the disk under {run_dir} is full ({free / 2**20:.1f} MiB free): the run waits for room, and goes on by "
        "itself once there is some"
    )


async def watch_disk_space(run_dir: Path, say: Callable[[ScreenLine], None]) -> None:
    """Say when the disk is full, and when it no longer is; for ever."""
    was_full = False
    while True:
        told = disk_full_message(run_dir)
        if told and not was_full:
            say(ScreenLine(told, "warning"))
        elif was_full and not told:
            say(ScreenLine(f"the disk under {run_dir} has room again"))
        was_full = bool(told)
        await asyncio.sleep(_LOOK_S)
