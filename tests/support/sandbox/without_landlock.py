"""Two sessions of a function where the kernel has no Landlock: can one reach into the other's worker?

`python -m tests.support.sandbox.without_landlock` prints the parts of the level bubblewrap and the outcomes of both
calls as JSON. What it is not: a test; tests/integration/reward/sandbox/test_attacks.py runs it and judges.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from typing import Any

import structlog

from gspo.reward.sandbox.calls import Code
from gspo.reward.sandbox.execution import Sandbox
from gspo.reward.sandbox.levels import try_level
from tests.support.sandbox_attacks import ALL, LIMITS, RUNNER, _outcome, lose_landlock

WAITS = "import time\ndef values():\n    time.sleep(2)\n    return [1.0, 2.0]"


async def _run() -> dict[str, Any]:
    level = await try_level("bubblewrap")
    sandbox = Sandbox(Code("attacks", RUNNER, "0" * 64, "runner.py"), LIMITS, level, num_workers=3)
    await sandbox.load()
    waiting = asyncio.create_task(_outcome(sandbox, WAITS, "victim"))
    await asyncio.sleep(0.5)
    (attack,) = [attack for attack in ALL if attack.name == "other workers by /proc"]
    outcomes = {"attack": asdict(await _outcome(sandbox, attack.source, None)), "victim": asdict(await waiting)}
    await sandbox.close()
    return outcomes | {"parts": level.parts}


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    lose_landlock()
    print(json.dumps(asyncio.run(_run())))  # noqa: T201
