"""LoRA on a mixture of experts through the whole system, where groups of equal rewards are replaced by others.

Not here: the books of a run (test_run.py), a mixture whose weights are trained themselves (test_run_moe.py).
"""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gspo.common.weights import policy_digest
from tests.support.gspo_run import WholeRun, whole_run
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.timeout(600)
STEPS, GROUPS = 2, 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    folder = tmp_path_factory.mktemp("run")
    return whole_run(
        folder,
        make_tiny_model(folder / "model", seed=3, scale=4.0, num_experts=4),
        # Of two answers about half of the time both have the same reward.
        algorithm={
            "rollout_batch_size": GROUPS,
            "num_return_sequences_in_group": 2,
            "pg_clip_low": 0.1,
            "pg_clip_high": 0.1,
            "filter_zero_spread": True,
        },
        learner={"learning_rate": 1e-2, "lora": {"rank": 4}},
        run={"total_steps": STEPS},
    )


def test_the_engine_serves_what_the_adapters_make_of_the_base(run: WholeRun) -> None:
    versions = [{version for row in run.rows(step) for version in row["version"]} for step in (1, STEPS)]
    assert versions == [{0}, {STEPS - 1}], "the second step was not sampled from pushed weights"
    for line in run.lines("metrics.jsonl"):
        assert line["figures"]["sigma_token"] < 1e-5
    assert len({line["digest"] for line in run.lines("policy.jsonl")}) == STEPS + 1


def test_the_export_is_the_base_with_its_adapters(run: WholeRun) -> None:
    exported = load_file(run.run_dir / "export" / "model.safetensors")
    digest = policy_digest((name, "float32", tuple(t.shape), t.numpy()) for name, t in exported.items())
    assert run.lines("policy.jsonl")[-1]["digest"] == digest
    original = load_file(run.folder / "model" / "model.safetensors")
    changed = {name for name, tensor in exported.items() if not torch.equal(tensor, original[name])}
    assert exported.keys() == original.keys()
    assert {"self_attn.q_proj", "experts.0.down_proj", "mlp.gate"} <= {
        kind for name in changed for kind in ("self_attn.q_proj", "experts.0.down_proj", "mlp.gate") if kind in name
    }
    base = AutoModelForCausalLM.from_pretrained(run.folder / "model", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, run.run_dir / "export" / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(run.run_dir / "export", dtype=torch.float32).eval()
    token_RS = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert torch.allclose(adapted(token_RS).logits, merged(token_RS).logits, atol=1e-4)


def test_groups_of_equal_rewards_are_settled_and_others_fill_the_batch(run: WholeRun) -> None:
    rewards: dict[int, set[float]] = {}
    for step in range(1, STEPS + 1):
        rows = run.rows(step)
        assert len({row["group"] for row in rows}) == GROUPS
        for row in rows:
            rewards.setdefault(row["group"], set()).add(row["reward"])
    assert all(len(values) == 2 for values in rewards.values())
    filtered = [line["group"] for line in run.lines("settled.jsonl") if line["settlement"] == "filtered"]
    assert filtered and not rewards.keys() & set(filtered)
    groups = json.loads((run.run_dir / "summary.json").read_text())["groups"]
    assert (groups["trained"], groups["filtered"]) == (STEPS * GROUPS, len(filtered))
    assert sum(line["figures"]["groups_filtered"] for line in run.lines("metrics.jsonl")) <= len(filtered)
