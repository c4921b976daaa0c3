"""The nightly tests: areas that leave nothing out, their records, and the rule by which an area is red."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.nightly import __main__ as nightly
from tests.nightly import records
from tests.nightly.areas import NOT_RUN, ROOT, Area, all_areas
from tests.nightly.records import AreaRecord, why_red

TODAY = datetime.date(2026, 11, 26)
HEAD = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
PASSED = AreaRecord("area", "pass", "", 1.0, "2026-11-20", HEAD, "a machine")


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page and a file of records of its own."""
    monkeypatch.setattr(records, "RECORDS", tmp_path / "nightly.json")
    monkeypatch.setattr(records, "PAGE", tmp_path / "nightly.md")
    monkeypatch.setattr(nightly, "_LOGS", tmp_path / "logs")
    (tmp_path / "nightly.md").write_text("before\n<!-- rows: make nightly -->\n<!-- end of rows -->\nafter\n")
    return tmp_path / "nightly.md"


def run(monkeypatch: pytest.MonkeyPatch, areas: list[Area], *words: str) -> int:
    monkeypatch.setattr(nightly, "all_areas", lambda: areas)
    monkeypatch.setattr(nightly, "_commit", lambda: HEAD[:10])
    monkeypatch.setattr(sys, "argv", ["nightly", *words])
    return nightly.main()


def test_every_long_test_is_in_an_area() -> None:
    commands = [" ".join(area.command) for area in all_areas() if "pytest" in area.command]
    for path in (ROOT / "tests").rglob("test_*.py"):
        if re.search(r"^@pytest\.mark\.long|pytestmark = .*mark\.long", path.read_text(), re.MULTILINE):
            places = [str(it.relative_to(ROOT)) for it in (path, *path.parents) if it.is_relative_to(ROOT / "tests")]
            assert any(place in command.split() for command in commands for place in places), path


def test_names_of_areas_differ() -> None:
    names = [area.name for area in all_areas()]
    assert len(names) == len(set(names))


def test_an_area_is_red_without_a_recent_pass() -> None:
    def reason(record: AreaRecord | None) -> str:
        return why_red("area", {"area": {"passed": record}} if record else {}, TODAY)

    assert reason(PASSED) == ""
    assert reason(None) == "it has never passed"
    assert "8 days ago" in reason(replace(PASSED, date="2026-11-18"))
    assert "no commit here" in reason(replace(PASSED, commit="0123456789"))


def test_a_night_is_resumed_and_says_what_failed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A passed area is not run again at the same commit; the others are."""
    count, fixed = tmp_path / "count", tmp_path / "fixed"
    areas = [
        Area("passes", "one that passes", ("sh", "-c", f"echo x >> {count}"), 1),
        Area("fails", "one that fails", ("sh", "-c", f"echo 'FAILED tests/x.py::y - z'; test -e {fixed}"), 1),
        Area("lacks", "one without its tool", ("sh", "-c", f"echo 'no engine'; exit {NOT_RUN}"), 1),
        Area("tool", "one without its program", ("sh", "-c", "true"), 1, "no-such-program"),
        Area("long", "one beyond its limit", ("sleep", "60"), 0.01),
    ]
    assert run(monkeypatch, areas) == 1
    stored = json.loads((page.with_name("nightly.json")).read_text())
    assert {name: it["last"]["result"] for name, it in stored.items()} == {
        "passes": "pass",
        "fails": "fail",
        "lacks": "not run",
        "tool": "not run",
        "long": "fail",
    }
    text = page.read_text()
    assert "**RED** fail: tests/x.py::y" in text and "**RED** not run: no engine" in text
    assert text.startswith("before\n") and text.endswith("after\n")
    fixed.touch()
    assert run(monkeypatch, areas[:2]) == 0
    assert count.read_text() == "x\n"
    assert run(monkeypatch, areas, "--check") == 1
    assert "red: long: it has never passed" in capsys.readouterr().err


def test_records_are_no_change_of_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second area of a night would else run at another commit than the first, and no night could be resumed."""
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    files = [tmp_path / "docs/nightly.json", tmp_path / "docs/nightly.md", tmp_path / "docs/other.md"]
    (tmp_path / "docs").mkdir()
    for file in files:
        file.write_text("before\n")
    committer = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (["init", "-q"], ["add", "."], [*committer, "commit", "-q", "-m", "files"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    for file in files[:2]:
        file.write_text("after\n")
    assert re.fullmatch("[0-9a-f]{10}", nightly._commit())
    files[2].write_text("after\n")
    assert nightly._commit().endswith("+")


def test_an_unknown_area_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, all_areas(), "--only", "no-such-area")
    assert "no-such-area: the areas are" in capsys.readouterr().err
