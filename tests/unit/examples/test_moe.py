"""The mixture-of-experts benchmark's own arithmetic and page, from runs written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.experiments.moe.comparison_run import FIGURES, changed
from examples.experiments.moe.stability_page import GENERATED, write_page


def test_experts_are_a_set_and_a_token_counts_once() -> None:
    # Two answers of two and one tokens, two layers, two experts each.
    before = [[[[0, 1], [2, 3]], [[0, 1], [2, 3]]], [[[4, 5], [6, 7]]]]
    after = [[[[1, 0], [2, 3]], [[0, 2], [3, 4]]], [[[4, 5], [6, 8]]]]
    assert changed(before, before) == {"tokens": 0.0, "layers": 0.0}
    # The first token only names its experts in another order; the second differs in both layers, the third in one.
    assert changed(before, after) == {"tokens": pytest.approx(2 / 3), "layers": pytest.approx(3 / 6)}


def run(algorithm: str, seed: int, clipped: float) -> dict[str, Any]:
    series = {name: [0.5, 0.5] for name in FIGURES} | {"clipped_tokens": [clipped, clipped]}
    shares = {"tokens": 0.25, "layers": 0.125}
    return {
        "algorithm": algorithm,
        "seed": seed,
        "measured_unix_s": 0.0,
        "machine": {"processor": "a processor", "cores": 2, "packages": {"torch": "1"}},
        "series": series,
        "accuracy": [{"step": 0, "mean": 0.1, "stderr": 0.01}, {"step": 2, "mean": 0.9, "stderr": 0.01}],
        "experts": {"bfloat16": shares, "float32": shares, "one_step": shares, "busiest": 0.2},
    }


def test_the_page_says_mean_least_and_most_and_keeps_what_is_written_by_hand(tmp_path: Path) -> None:
    (tmp_path / "moe.md").write_text(f"# By hand\n\n{GENERATED}\nold\n")
    runs = [run("gspo", 0, 0.1), run("gspo", 1, 0.3), run("grpo", 0, 0.001), run("grpo", 1, 0.001)]
    page = write_page(runs, tmp_path).read_text()
    assert page.startswith("# By hand\n")
    assert "old" not in page
    assert "| clipped share of tokens | 20.00% (10.00% to 30.00%) | 0.10% (0.10% to 0.10%) |" in page
    assert "Tokens that GSPO clips for each one that GRPO clips: 200." in page
    assert (tmp_path / "moe-stability.png").stat().st_size > 0
    assert json.loads((tmp_path / "moe.json").read_text()) == runs
