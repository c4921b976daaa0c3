"""Tells which level of the sandbox this machine gives, as JSON: `python -m gspo.reward.sandbox`.

It scores nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys

import structlog

from gspo.reward.sandbox.levels import find_level


def main() -> None:
    """Print the level, what it is made of here, and what is lacking for those above it."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    found = asyncio.run(find_level("rlimits"))
    json.dump({"level": found.level.name, "parts": found.parts, "lacks": found.level.lacks}, sys.stdout)


if __name__ == "__main__":
    main()
