"""In a real browser: the pages of a run's functions. Screenshots are left in .cache/browser."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gspo.cli.report.writer import write_report
from gspo.cli.rundir.start import ENVIRONMENT_NAME
from gspo.learner.assembly.rows import row_from_scored
from tests.browser.chromium import text_of
from tests.browser.function_run import NEW, OLD, VIEWS, page_process, screenshot, write_function_log
from tests.support.service_process import make_run
from tests.support.tiny_model import make_tiny_model
from tests.unit.learner.conftest import _scored

_PAGES = {"functions": "functions", "function": f"functions/{NEW}", "difference": f"functions/{NEW}/against/{OLD}"}


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    run_dir = make_run(tmp_path, make_tiny_model(tmp_path / "model")).run_dir
    (run_dir / ENVIRONMENT_NAME).write_text("{}")
    write_function_log(run_dir, row_from_scored(_scored()))
    # The browser's virtual time would wait for the stream of an open run.
    write_report(run_dir, finished={"end": "completed", "reason": "run.total_steps reached"})
    async with page_process(run_dir) as address:
        yield address


async def test_curves_source_and_difference_are_shown(url: str, tmp_path: Path) -> None:
    page = await text_of(f"{url}functions", tmp_path / "profile")
    assert len(re.findall("<canvas", page)) == len(re.findall("<figure", page)) == 2
    assert "Cannot be shown" not in page
    page = await text_of(f"{url}functions/{NEW}/against/{OLD}", tmp_path / "profile")
    assert re.search(r'class="added".*a tenth for any number', page)


async def test_screenshots_of_each_view(url: str, tmp_path: Path) -> None:
    for name, path in _PAGES.items():
        for view in VIEWS:
            picture = await screenshot(f"{url}{path}", name, view, tmp_path / f"{name}-{view}")
            assert picture.stat().st_size > 20_000, "a page with contents"
