"""Tells which level of the sandbox this machine gives, as JSON: `python -m services.reward.tell_level`.

It scores nothing. Neighbours: levels.py finds the level; `gspo doctor` starts this and shows it.
"""

from __future__ import annotations

import asyncio
import json
import sys

import structlog

from services.reward.levels import find_level


def main() -> None:
    """Print the level, what it is made of here, and what is lacking for those above it."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    found = asyncio.run(find_level("rlimits"))
    json.dump({"level": found.level.name, "parts": found.parts, "lacks": found.level.lacks}, sys.stdout)


if __name__ == "__main__":
    main()
