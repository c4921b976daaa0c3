"""The best version is kept, in any order of events and after a kill at any time."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo.learner.storage.best_version import BEST, FACTS, BestVersion
from gspo.learner.storage.candidates import CANDIDATES


def model(version: int) -> Callable[[Path], None]:
    """Writes a model folder that says whose it is."""

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "weights").write_text(str(version))

    return write


def kept(run_dir: Path) -> str | None:
    path = run_dir / BEST / "weights"
    return path.read_text() if path.exists() else None


def candidates(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / CANDIDATES).glob("*"))


def test_the_highest_score_is_kept_and_of_equals_the_first(tmp_path: Path) -> None:
    best = BestVersion(tmp_path, "sampled_mean", {})
    seen = []
    for version, score in enumerate((0.25, 0.5, 0.5, 0.375, 0.75)):
        best.save_candidate(version, model(version))
        assert candidates(tmp_path) == [f"step-{version:06d}"]
        best.record_score(version, score)
        seen.append(kept(tmp_path))
        assert candidates(tmp_path) == []
    assert seen == ["0", "1", "1", "1", "4"]
    assert json.loads((tmp_path / BEST / FACTS).read_text()) == {
        "version": 4,
        "step": 4,
        "figure": "sampled_mean",
        "score": 0.75,
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == [BEST, CANDIDATES]


def test_a_version_without_a_score_goes(tmp_path: Path) -> None:
    best = BestVersion(tmp_path, "sampled_mean", {})
    best.save_candidate(0, model(0))
    best.record_score(0, None)
    assert (kept(tmp_path), candidates(tmp_path), best.version) == (None, [], None)


def test_the_first_score_of_a_version_counts(tmp_path: Path) -> None:
    best = BestVersion(tmp_path, "sampled_mean", {})
    for version, score in ((1, 0.5), (2, 0.25)):
        best.save_candidate(version, model(version))
        best.record_score(version, score)
    best.save_candidate(2, model(2))
    best.record_score(2, 0.75)
    assert (kept(tmp_path), best.version, candidates(tmp_path)) == ("1", 1, [])


def test_figures_that_come_before_the_model_is_written(tmp_path: Path) -> None:
    best = BestVersion(tmp_path, "sampled_mean", {})
    best.record_score(3, 0.5)
    assert kept(tmp_path) is None
    best.save_candidate(3, model(3))
    assert (kept(tmp_path), candidates(tmp_path)) == ("3", [])

    writing, go_on = threading.Event(), threading.Event()

    def slow(folder: Path) -> None:
        writing.set()
        assert go_on.wait(10)
        model(4)(folder)

    writer = threading.Thread(target=best.save_candidate, args=(4, slow))
    measurer = threading.Thread(target=best.record_score, args=(4, 0.75))
    writer.start()
    assert writing.wait(10)
    measurer.start()
    go_on.set()
    writer.join(10)
    measurer.join(10)
    assert (kept(tmp_path), candidates(tmp_path)) == ("4", [])


@pytest.mark.parametrize("when", ["recorded", "old best put away", "moved"])
def test_a_kill_while_the_best_changes_is_mended_at_the_next_start(tmp_path: Path, when: str) -> None:
    best = BestVersion(tmp_path, "sampled_mean", {})
    best.save_candidate(1, model(1))
    best.record_score(1, 0.25)
    best.save_candidate(2, model(2))
    best.save_candidate(3, model(3))
    if when != "recorded":
        (tmp_path / BEST).rename(tmp_path / f"{BEST}.tmp")
    if when == "moved":
        (tmp_path / CANDIDATES / "step-000002").rename(tmp_path / BEST)
    (tmp_path / CANDIDATES / ".step-000004.abc").mkdir()
    again = BestVersion(tmp_path, "sampled_mean", {1: 0.25, 2: 0.5})
    assert (kept(tmp_path), again.version) == ("2", 2)
    assert candidates(tmp_path) == ["step-000003"], "what is not measured yet stays"
    assert not (tmp_path / f"{BEST}.tmp").exists()


def test_an_old_best_comes_back_where_the_new_one_was_lost(tmp_path: Path) -> None:
    best = BestVersion(tmp_path, "sampled_mean", {})
    best.save_candidate(1, model(1))
    best.record_score(1, 0.25)
    (tmp_path / BEST).rename(tmp_path / f"{BEST}.tmp")
    shutil.rmtree(tmp_path / CANDIDATES)
    BestVersion(tmp_path, "sampled_mean", {1: 0.25, 2: 0.5})
    assert kept(tmp_path) == "1"
