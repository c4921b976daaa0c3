"""Prints the level of confinement that this machine supports, as JSON: `python -m gspo.reward.sandbox`."""

import asyncio
import json
import sys

import structlog

from gspo.reward.sandbox.levels import find_level


def main() -> None:
    """Print the level, its parts, and why the machine does not support the stronger ones."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    level = asyncio.run(find_level("rlimits"))
    json.dump({"level": level.name, "parts": level.parts, "lacks": level.lacks}, sys.stdout)


if __name__ == "__main__":
    main()
