"""Models in the layouts in which families are published, through the whole system: three steps, two pushes, an export.

docs/models.md has a row for each, and a test compares it with its results.
"""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from vllm.model_executor.models import registry

from gspo.common.config.engines import GenerationConfig
from gspo.common.weights.manifest import policy_digest
from gspo.generation.check import _NEED_TORCHVISION
from gspo.generation.engine.api import EngineSampling
from gspo.generation.engine.vllm_engine import Engine, engine_arguments
from tests.integration.layouts.published_layouts import LAYOUTS
from tests.support.gspo_run import whole_run

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
STEPS = 3
PAGE = Path(__file__).parents[3] / "docs/models.md"
FAMILIES = {
    "qwen2_5": "Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "llama3": "Llama 3",
    "gemma3_text": "Gemma 3, text",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "gpt_oss": "gpt-oss, bfloat16",
    "glm4": "GLM-4 (0414)",
    "phi4": "Phi-4",
}
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
    asyncio.run(check_export(run.run_dir / "export"))
    own_attention = "own_attention" in (run.run_dir / "services" / "learner-0.log").read_text()
    learner = "own attention, padded" if own_attention else "packed"
    kind = json.loads((tmp_path / "model" / "config.json").read_text())["model_type"]
    row = f"| {FAMILIES[layout]} | {kind} | {learner} | passes |"
    assert row in PAGE.read_text().splitlines(), f"docs/models.md: write this row in its place: {row}"


async def check_export(folder: Path) -> None:
    """vLLM and transformers load an export, and have one distribution."""
    keys, prompt = GenerationConfig(max_rollouts=4, kv_cache_gb=0.25), [5, 6, 7, 8]
    engine = await Engine.start(engine_arguments(folder, keys, max_model_len=64))
    try:
        answer = await engine.generate("export", prompt, EngineSampling(24, ignore_eos=True))
    finally:
        await engine.stop()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits_TV = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
    logp_T = torch.log_softmax(logits_TV, -1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(answer.logp), logp_T, atol=1e-4)


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_the_models_of_text_that_vllm_cannot_import_without_torchvision_are_listed() -> None:
    missing = set()
    for name in {*registry._TEXT_GENERATION_MODELS, *_NEED_TORCHVISION}:
        try:
            registry.ModelRegistry.models[name].load_model_cls()
        except ModuleNotFoundError as error:
            assert error.name == "torchvision", name
            missing.add(name)
    assert missing == _NEED_TORCHVISION
    verdict = "refused without torchvision, passes with it in bfloat16; never run on a GPU"
    assert f"| Qwen3.5, text | qwen3_5_text | padded | {verdict} |" in PAGE.read_text().splitlines()
