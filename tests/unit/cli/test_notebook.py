"""The notebook examples/read_log.ipynb on the log of a run that ended: its code cells, in their order.

Without a kernel: the cells are plain Python.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from tests.unit.view.test_report import ended, path

__all__ = ["ended", "path"]
ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "examples/read_log.ipynb"


def test_the_notebook_reads_and_plots_a_log(ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSPO_RUN", str(ended))
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    plt.switch_backend("Agg")
    try:
        for cell in cells:
            exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)  # noqa: S102 - the project's own
        assert len(plt.get_fignums()) == 2
    finally:
        plt.close("all")
    steps = len(list((ended / "log").glob("step-*.parquet")))
    assert len(names["figures"]) == len(names["by_step"]) == steps > 0
    assert names["by_step"].reward.between(names["counted"].reward.min(), names["counted"].reward.max()).all()
    assert (names["counted"].age >= 0).all()
    assert names["best"].reward.iloc[0] == names["counted"].reward.max()


def test_the_notebook_has_no_output() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
