"""Models in the layouts in which families are published, through the whole system: three steps and two pushes."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from gspo.common.weights.manifest import policy_digest
from tests.integration.layouts.published_layouts import LAYOUTS
from tests.support.gspo_run import whole_run

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
STEPS = 3
# Left over in the files: neither engine has them in its policy.
LEFT_OVER = {"qwen3": {"lm_head.weight"}, "llama3": {f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in (0, 1)}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_engines_have_one_policy_before_and_after_pushes(tmp_path: Path, layout: str) -> None:
    LAYOUTS[layout](tmp_path / "model")
    run = whole_run(
        tmp_path,
        tmp_path / "model",
        algorithm={"preset": "grpo", "rollout_batch_size": 4, "num_return_sequences_in_group": 4},
        learner={"learning_rate": 1e-3},
        staleness={"max_lag": 0},
        run={"total_steps": STEPS},
    )
    left_over = LEFT_OVER.get(layout, set())
    assert (f"{len(left_over)} of" in run.printed and "are no part of the policy" in run.printed) is bool(left_over)
    for step, line in enumerate(run.lines("metrics.jsonl"), 1):
        assert {version for row in run.rows(step) for version in row["version"]} == {step - 1}
        assert line["figures"]["sigma_token"] < 1e-4, "the engines' log-probs differ at equal weights"
        assert line["figures"]["grad_norm"] > 0
    exported = load_file(run.run_dir / "export" / "model.safetensors")
    files = (tmp_path / "model").glob("model*.safetensors")
    stored = {name for file in files for name in load_file(file)}
    assert exported.keys() == stored - left_over
    tensors = ((name, "float32", tuple(tensor.shape), tensor.numpy()) for name, tensor in exported.items())
    assert run.lines("policy.jsonl")[-1]["digest"] == policy_digest(tensors)
