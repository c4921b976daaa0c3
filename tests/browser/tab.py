"""One tab of a headless Chromium that a test drives over the DevTools protocol: load, wait, click, take a picture.

For pages that keep a stream open; chromium.py loads pages whose scripts come to an end.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from tests.browser.chromium import browser

WAIT_S, _LOOK_S = 50.0, 0.05
_SCREENSHOTS = Path(__file__).parents[2] / ".cache" / "browser"


class Tab:
    """The tab; each call waits for the browser's answer."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._numbers = connection, itertools.count(1)

    async def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol; events are dropped."""
        number = next(self._numbers)
        await self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(await self._connection.recv())
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])

    async def value(self, script: str) -> Any:
        """The value of a script in the page."""
        answer = await self.command("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def wait_for(self, script: str) -> None:
        """Wait until a script gives something true, also over loads of other pages."""
        for _ in range(int(WAIT_S / _LOOK_S)):
            if await self.value(f"Boolean({script})"):
                return
            await asyncio.sleep(_LOOK_S)
        raise AssertionError(f"waited {WAIT_S:g} s for {script} at {await self.value('location.href')}")

    async def load(self, url: str, ready: str = "true") -> None:
        """Load a page, and wait until it is whole and a script gives something true."""
        await self.command("Page.navigate", url=url)
        await self.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete' && ({ready})")

    async def text(self) -> str:
        """The page as HTML."""
        return str(await self.value("document.documentElement.outerHTML"))

    async def picture(self, name: str, width: int, *, is_dark: bool = False) -> Path:
        """A picture of the whole page in .cache/browser."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        await self.command("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        await self.command("Emulation.setDeviceMetricsOverride", **size)
        await asyncio.sleep(0.3)  # curves follow the width
        answer = await self.command("Page.captureScreenshot", captureBeyondViewport=True)
        _SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = _SCREENSHOTS / f"{name}.png"
        path.write_bytes(base64.b64decode(answer["data"]))
        return path


@asynccontextmanager
async def open_tab(profile: Path) -> AsyncIterator[Tab]:
    """A browser with one empty tab, until the end of the block.

    Args:
        profile: Empty folder for its files.
    """
    async with browser(profile, "--remote-debugging-port=0", "about:blank"):
        address = profile / "DevToolsActivePort"
        while not address.exists() or len(address.read_text().splitlines()) < 2:
            await asyncio.sleep(_LOOK_S)
        port, path = address.read_text().splitlines()[:2]
        async with connect(f"ws://127.0.0.1:{port}{path}", max_size=2**27) as connection:
            whole = Tab(connection)
            targets = (await whole.command("Target.getTargets"))["targetInfos"]
            target = next(known["targetId"] for known in targets if known["type"] == "page")
        async with connect(f"ws://127.0.0.1:{port}/devtools/page/{target}", max_size=2**27) as connection:
            yield Tab(connection)
