"""The workload of a benchmark: a random Qwen3 of 3.2 M parameters, prompts, a trivial reward, a configuration.

Two models: one has no end-of-sequence token, so every answer is exactly as long as allowed; the other ends an answer
at a random token, so lengths are near exponential.
"""

from __future__ import annotations

import json
import random
import shutil
from math import prod
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness.child_process import run_child
from benchmarks.harness.sizes import (
    CACHE,
    GROUP_SIZE,
    GROUPS,
    KV_CACHE_GIB,
    MAX_TOKENS,
    NUM_MINI_BATCHES,
    PROMPT_LENGTH,
    Dtype,
    Lengths,
)

HIDDEN_SIZE, LAYERS = 256, 4
_NUM_PROMPTS = 1024
_MODEL_S = 120.0
_REWARD = '''"""A reward that costs nothing and differs within a group."""


def reward(prompts, completions, **columns):
    return [float(c[0]["content"][:1] < "P") for c in completions]
'''

Message = dict[str, str]


def model_folder(lengths: Lengths) -> Path:
    """The model of answers of these lengths; made at the first call."""
    folder = CACHE / f"model-{lengths}"
    if not folder.exists():
        half_made = CACHE / f"model-{lengths}.tmp"
        shutil.rmtree(half_made, ignore_errors=True)
        spec = {"folder": str(half_made), "hidden_size": HIDDEN_SIZE, "layers": LAYERS, "ends": lengths != "fixed"}
        run_child("harness.model_writer", spec, timeout_s=_MODEL_S)
        half_made.rename(folder)
    return folder


def num_parameters(folder: Path) -> int:
    """Elements of all tensors in a model folder."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="np") as file:
        return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - not a mapping


def prompts(count: int) -> list[list[Message]]:
    """The first prompts of the data, as chat messages, all different."""
    chosen = random.Random(0).sample(range(100 * 100), count)
    return [[{"role": "user", "content": f"{n // 100}+{n % 100}="}] for n in chosen]


def prompt_token_ids(lengths: Lengths, count: int) -> list[list[int]]:
    """The first prompts as token ids, after the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder(lengths))
    texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts(count)]
    return [tokenizer.encode(text) for text in texts]


def write_config(name: str, lengths: Lengths, dtype: Dtype, **sections: Any) -> Path:
    """A configuration in a folder of its own, which is emptied; `sections` go over the benchmark's own keys."""
    folder = CACHE / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in prompts(_NUM_PROMPTS))
    (folder / "prompts.jsonl").write_text("".join(lines))
    (folder / "reward.py").write_text(_REWARD)
    config: dict[str, Any] = {
        "name": "run",
        "model": {"path": str(model_folder(lengths))},
        "data": {"prompts": "prompts.jsonl"},
        "reward": {"functions": [{"path": "reward.py"}]},
        "algorithm": {
            "rollout_batch_size": GROUPS,
            "num_return_sequences_in_group": GROUP_SIZE,
            "prompt_length": PROMPT_LENGTH,
            "response_length": MAX_TOKENS[lengths],
            "num_mini_batches": NUM_MINI_BATCHES,
        },
        # Compiled graphs, which a run of hours wants and a short one does not.
        "generation": {"dtype": dtype, "kv_cache_gb": KV_CACHE_GIB, "engine": {"enforce_eager": False}},
        "learner": {"dtype": dtype},
        "run": {"directory": ".", "total_steps": 1, "checkpoint_every": 1000},
    }
    for section, keys in sections.items():
        config[section] = {**config.get(section, {}), **keys}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path
