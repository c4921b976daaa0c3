"""A replay is told what the first training left out. The step that it trains only takes time, and none here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.simulated.maker import SimulatedMaker
from benchmarks.simulated.settings import Settings
from services.common.activity import Activity
from services.common.config import Config
from services.learner.making import Trained
from services.learner.recovery import recover
from services.learner.rows import Row, row_from_scored
from services.learner.rundir import RunDir
from tests.service_process import make_run
from tests.tiny_model import make_tiny_model


class _Told(SimulatedMaker):
    """Keeps which updates it was told to leave out, by step."""

    def __init__(self, config: Config, folder: Path, run_dir: Path) -> None:
        super().__init__(config, folder, run_dir, Settings(time_scale=0))
        self.known: dict[int, list[int]] = {}

    def train(self, step: int, rows: Sequence[Row], known: Collection[int] = ()) -> Trained:
        self.known[step] = list(known)
        return super().train(step, rows, known)


def test_a_replay_leaves_out_what_the_log_says_was_left_out(tmp_path: Path, scored) -> None:
    make_tiny_model(tmp_path / "model", hidden_size=32, layers=1)
    config = make_run(tmp_path, tmp_path / "model")
    with RunDir(tmp_path / "run") as run:
        for step in (1, 2):
            run.write_step(step, [replace(row_from_scored(scored(step)), step=step)])
        run.append_not_applied(2, [{"update": 3, "mini_batch": 1, "reason": "the loss is nan"}])
        maker, _, last = recover(config, tmp_path / "model", run, Activity("learner"), _Told)
        assert [version.version for version in run.versions()] == [1, 2]
    assert (last, maker.known) == (2, {1: [], 2: [3]})
