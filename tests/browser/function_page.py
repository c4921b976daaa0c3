"""In a real browser: the pages of a run's functions. Screenshots are left in .cache/browser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gspo.common.config.loading import ENVIRONMENT_NAME
from gspo.learner.assembly.rows import row_from_scored
from gspo.view.picture.page import write_report
from tests.browser.function_run import NEW, OLD, page_process, write_function_log
from tests.browser.tab import WAIT_S, Tab, open_tab
from tests.support.service_process import make_run
from tests.support.tiny_model import make_tiny_model
from tests.unit.learner.conftest import _scored

_PAGES = {"functions": "functions", "function": f"functions/{NEW}", "difference": f"functions/{NEW}/against/{OLD}"}


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    run_dir = make_run(tmp_path, make_tiny_model(tmp_path / "model")).run_dir
    (run_dir / ENVIRONMENT_NAME).write_text("{}")
    write_function_log(run_dir, row_from_scored(_scored()))
    write_report(run_dir, finished={"end": "completed", "reason": "run.total_steps reached"})
    async with page_process(run_dir) as address:
        yield address


async def test_curves_source_and_difference_are_shown(url: str, tmp_path: Path) -> None:
    async with open_tab(tmp_path / "profile") as tab:
        await tab.load(f"{url}functions", "document.querySelectorAll('canvas').length === 2")
        assert "Cannot be shown" not in await tab.text()
        await tab.load(f"{url}functions/{NEW}/against/{OLD}")
        assert re.search(r'class="added".*a tenth for any number', await tab.text())
        for name, path in _PAGES.items():
            await tab.load(
                f"{url}{path}", "!document.querySelector('figure, #curves') || document.querySelector('canvas')"
            )
            await pictures(tab, name)


async def test_an_opened_view_comes_with_a_notice_and_a_way_back(url: str, tmp_path: Path) -> None:
    async with open_tab(tmp_path / "profile") as tab, httpx.AsyncClient(base_url=url) as client:
        body = {"path": "/steps/9/groups/18", "note": "look <b>here</b>"}
        assert (await client.post("/api/view", json=body)).status_code == 409
        await tab.load(f"{url}rollouts?sort=reward")
        async with asyncio.timeout(WAIT_S):
            while (answer := await client.post("/api/view", json=body)).status_code == 409:
                await asyncio.sleep(0.1)
        assert answer.json() == {"opened": "/steps/9/groups/18", "browsers": 1}
        await tab.wait_for("location.pathname === '/steps/9/groups/18' && document.querySelector('#opened a')")
        assert "look &lt;b&gt;here&lt;/b&gt;" in await tab.text()
        await pictures(tab, "opened")
        await tab.value("document.querySelector('#opened a').click()")
        await tab.wait_for("location.search === '?sort=reward' && document.readyState === 'complete'")
        assert await tab.value("document.getElementById('opened').hidden")
        assert await tab.value("sessionStorage.length") == 0


async def pictures(tab: Tab, name: str) -> None:
    """The page as it is, in each of the three views."""
    for view, width, is_dark in (("light", 1300, False), ("dark", 1300, True), ("narrow", 420, False)):
        picture = await tab.picture(f"{name}-{view}", width, is_dark=is_dark)
        assert picture.stat().st_size > 10_000, "a page with contents"
