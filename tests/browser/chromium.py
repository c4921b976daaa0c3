"""A headless Chromium that loads one page. It keeps nothing.

What it is not: a driver; a page does its work itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

LOAD_S = 60
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # A page of the internet, as far as names go: each of these is this machine.
    "--host-resolver-rules=MAP *.example 127.0.0.1",
    # Newer versions ask the user before a page of the internet may call this machine; older ones do not.
    "--disable-features=LocalNetworkAccessChecks",
)


@asynccontextmanager
async def browser(profile: Path, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Chromium with further words on its command line, until the end of the block.

    Args:
        profile: Empty folder for its files.
    """
    process = await asyncio.create_subprocess_exec(
        "chromium", *FLAGS, f"--user-data-dir={profile}", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(LOAD_S):
            yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def text_of(url: str, profile: Path) -> str:
    """A page as it is when its scripts are done."""
    async with browser(profile, "--virtual-time-budget=20000", "--dump-dom", url) as process:
        text, _ = await process.communicate()
    return text.decode()
