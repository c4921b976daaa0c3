"""In a real browser: the page of `gspo view` draws its curves from a run's log.

`make browser-test` runs it on a machine with Chromium. Screenshots are left in .cache/browser.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gspo.common.config.loading import ENVIRONMENT_NAME
from gspo.learner.storage.run_directory import RunDir
from gspo.runlog.run_history import RunHistory
from gspo.runlog.run_log import PAGE_NAME
from gspo.view.picture.page import write_report
from gspo.view.picture.plots import curves_of
from tests.browser.tab import open_tab
from tests.support.service_process import make_run
from tests.support.tiny_model import make_tiny_model
from tests.unit.view.test_report import evaluate, train

_START_S = 60
# The texts of canvases without a line: coloured pixels, which axes and labels lack.
_WITHOUT_INK = """[...document.querySelectorAll("canvas")].filter((canvas) => {
  const spread = (rgb) => Math.max(...rgb) - Math.min(...rgb);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let coloured = 0;
  for (let i = 0; i < data.length; i += 4) coloured += data[i + 3] > 128 && spread(data.slice(i, i + 3)) > 30;
  return coloured < 20;
}).map((canvas) => canvas.closest("figure").textContent)"""
_VIEWS = {"light": (1400, False), "dark": (1400, True), "narrow": (420, False)}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return trained_run(tmp_path, reward=0.7)


def trained_run(folder: Path, reward: float) -> Path:
    """Twenty steps, and evaluations at both ends."""
    run_dir = make_run(folder, make_tiny_model(folder / "model")).run_dir
    (run_dir / ENVIRONMENT_NAME).write_text("{}")
    with RunDir(run_dir) as run:
        evaluate(run, 0, 0.35)
        train(run, 1, 20)
        evaluate(run, 20, reward)
    write_report(run_dir, finished={"end": "completed", "reason": "run.total_steps reached"})
    return run_dir


@asynccontextmanager
async def page_of(*run_dirs: Path) -> AsyncIterator[str]:
    """Address of the page of runs, as the command prints it."""
    words = [sys.executable, "-m", "gspo.cli", "view", *map(str, run_dirs), "--port", "0"]
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(_START_S):
            assert process.stdout is not None
            address = (await process.stdout.readline()).decode().strip()
        yield address
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.parametrize("place", ["page", "report"])
async def test_the_curves_are_drawn(run_dir: Path, tmp_path: Path, place: str) -> None:
    """By the server of the page, and by the report from the disk alone."""
    async with page_of(run_dir) as url, open_tab(tmp_path / "profile") as tab:
        address = url if place == "page" else (run_dir / PAGE_NAME).as_uri()
        await tab.load(address, f"document.querySelectorAll('canvas').length >= {len(curves_of(RunHistory(run_dir)))}")
        page = await tab.text()
        assert "The last steps were bound by" in page
        assert len(re.findall("<canvas", page)) >= len(re.findall("<figure", page)) >= 8
        assert "held-out prompts, sampled" in page
        assert "Cannot be shown" not in await tab.value("document.getElementById('following').textContent")
        assert await tab.value(_WITHOUT_INK) == []
        for view, (width, is_dark) in _VIEWS.items():
            picture = await tab.picture(f"{place}-{view}", width, is_dark=is_dark)
            assert picture.stat().st_size > 50_000, "a page with curves"


async def test_the_curves_of_two_runs_are_drawn(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = trained_run(tmp_path / "other", reward=0.5)
    async with page_of(run_dir, other) as url, open_tab(tmp_path / "profile") as tab:
        await tab.load(url.rstrip("/") + "/compare", "document.querySelectorAll('canvas').length >= 8")
        assert await tab.value(_WITHOUT_INK) == []
        for view, (width, is_dark) in _VIEWS.items():
            picture = await tab.picture(f"comparison-{view}", width, is_dark=is_dark)
            assert picture.stat().st_size > 50_000, "a page with curves"
