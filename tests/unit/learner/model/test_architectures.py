"""The learner's log-probs against the model's own attention and full logits, architecture by architecture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.learner.model_types import PAGE, examine, examine_all, quiet
from gspo.common.model.heads import PADDED_TYPES

# Of log-probs around -4.6, in float32.
TOLERANCE = 1e-4


def page_verdicts() -> set[tuple[str, str]]:
    """(model_type, verdict) of every architecture on the page."""
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ") and "`" in line]
    return {(name, verdict.strip("| ")) for verdict, _, names in rows[1:] for name in re.findall(r"`(.+?)`", names)}


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        ("llama", "carried, packed"),
        # Values narrower than keys.
        ("deepseek_v3", "carried, packed"),
        # Sinks in every layer, which torch's fused attention passes over.
        ("gpt_oss", "own attention, padded"),
        # Its code takes no other attention, and under another's name it would get no causal mask.
        ("bloom", "own attention, padded"),
        # It knows a few attentions by name alone, and has a bias after its output layer.
        ("gptj", "refused: changes its logits after the output layer"),
        ("cpmant", "refused: reads later tokens"),
    ],
)
def test_a_model_has_its_own_log_probs_or_is_refused(tmp_path: Path, kind: str, verdict: str) -> None:
    with quiet():
        finding = examine(kind, tmp_path)
    assert finding.verdict == verdict
    assert finding.difference is None or finding.difference < TOLERANCE


def test_ranks_share_no_lines_of_the_models_that_the_page_pads() -> None:
    listed = {name for name, verdict in page_verdicts() if verdict.endswith(", padded")}
    assert listed == PADDED_TYPES


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_architecture_is_as_the_page_says() -> None:
    """The verdict of every type that transformers has and the learner takes."""
    findings = examine_all()
    assert all(finding.difference < TOLERANCE for finding in findings if finding.difference is not None)
    assert page_verdicts() == {(f.kind, f.verdict) for f in findings}
