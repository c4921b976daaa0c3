"""A mixture of experts through the whole system, with CISPO and no routing replay; its export in both engines.

Not here: the books of a run (test_run.py), stability (`python -m examples.experiments moe`).
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gspo.common.config.engines import GenerationConfig
from gspo.common.weights.manifest import policy_digest
from gspo.generation.engine.api import EngineSampling
from gspo.generation.engine.vllm_engine import Engine, engine_arguments
from tests.support.gspo_run import WholeRun, whole_run
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
STEPS, NUM_EXPERTS, LAYERS = 2, 16, 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    folder = tmp_path_factory.mktemp("run")
    model = make_tiny_model(folder / "model", seed=3, scale=4.0, layers=LAYERS, num_experts=NUM_EXPERTS)
    return whole_run(
        folder,
        model,
        algorithm={
            "preset": "grpo",
            "objective": "cispo",
            "rollout_batch_size": 4,
            "num_return_sequences_in_group": 4,
        },
        learner={"learning_rate": 1e-3},
        run={"total_steps": STEPS},
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_the_engine_and_the_learner_agree_on_log_probs_before_and_after_a_push(run: WholeRun) -> None:
    versions = [{version for row in run.rows(step) for version in row["version"]} for step in (1, STEPS)]
    assert versions == [{0}, {STEPS - 1}], "the second step was not sampled from pushed weights"
    for line in run.lines("metrics.jsonl"):
        assert line["figures"]["sigma_token"] < 1e-5


def test_experts_and_routers_are_trained(run: WholeRun) -> None:
    before, after = weights(run.folder / "model"), weights(run.run_dir / "export")
    for kind in (r"experts\.\d+\.gate_proj", r"experts\.\d+\.up_proj", r"experts\.\d+\.down_proj", r"mlp\.gate"):
        names = [name for name in before if re.search(rf"{kind}\.weight$", name)]
        assert len(names) == LAYERS * (NUM_EXPERTS if "experts" in kind else 1)
        assert any(not torch.equal(before[name], after[name]) for name in names), kind


def test_the_export_has_the_names_of_the_given_model(run: WholeRun) -> None:
    before, after = weights(run.folder / "model"), weights(run.run_dir / "export")
    assert "model.layers.1.mlp.experts.15.down_proj.weight" in after
    assert {name: tensor.shape for name, tensor in after.items()} == {
        name: tensor.shape for name, tensor in before.items()
    }


def test_the_digest_that_the_generator_checked_is_the_exports(run: WholeRun) -> None:
    digest = policy_digest(
        (name, "float32", tuple(tensor.shape), tensor.numpy())
        for name, tensor in weights(run.run_dir / "export").items()
    )
    assert run.lines("policy.jsonl")[-1]["digest"] == digest


async def test_the_export_gives_the_same_log_probs_in_vllm_and_transformers(run: WholeRun) -> None:
    folder = run.run_dir / "export"
    engine = await Engine.start(
        engine_arguments(folder, GenerationConfig(max_rollouts=16, kv_cache_gb=0.25), max_model_len=128)
    )
    try:
        prompts = [[1, 33, 31, 17, 30, 98, 4 + number, 97, 6 + number] for number in range(8)]
        answers = await asyncio.gather(
            *(engine.generate(f"r{i}", prompt, EngineSampling(max_tokens=40)) for i, prompt in enumerate(prompts))
        )
    finally:
        await engine.stop()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        logp = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert np.abs(np.array(answer.logp) - logp.numpy()).max() < 1e-4
