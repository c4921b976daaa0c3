"""A child process: one side of a push that ends or stands still in the middle of a transfer over a direct road.

`python push_process.py generator|learner kill|stop RUN_DIR REDIS_URL`: at its fifth transfer it sends itself SIGKILL or
SIGSTOP, and leaves the other side with half of a version. Neighbours: push_peers.py is what it runs,
test_push_direct.py starts it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from services.common.configfile import read_config
from services.common.direct import Bytes, Link
from services.common.runtime import CONFIG_NAME
from services.learner import publisher
from tests.integration.push_peers import generator, learner, policy

# So small that the version goes in fifteen frames.
FRAME_BYTES = 4096
_TRANSFERS_BEFORE_THE_END = 4
_LIFE_S = 120.0


def _end_in_the_middle(method: str, how: signal.Signals) -> None:
    """Have the process end, or stand still, when it has moved so many frames."""
    whole, moved = getattr(Link, method), 0

    async def cut(self: Link, data: Bytes) -> None:
        nonlocal moved
        moved += 1
        if moved > _TRANSFERS_BEFORE_THE_END:
            os.kill(os.getpid(), how)
        await whole(self, data)

    setattr(Link, method, cut)


async def _be(side: str, config: Any, redis_url: str) -> None:
    async with asyncio.timeout(_LIFE_S):
        if side == "generator":
            async with generator(config, redis_url, "generation-1"):
                await asyncio.Event().wait()
        async with learner(config, redis_url) as learning:
            learning.publisher.publish(policy(1))
            await learning.until(lambda: False, _LIFE_S)


if __name__ == "__main__":
    side, how, run_dir, redis_url = sys.argv[1:]
    publisher.DIRECT_FRAME_BYTES = FRAME_BYTES
    _end_in_the_middle({"generator": "receive", "learner": "send"}[side], signal.Signals[f"SIG{how.upper()}"])
    asyncio.run(_be(side, read_config(Path(run_dir) / CONFIG_NAME), redis_url))
