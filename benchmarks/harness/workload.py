"""The workload of a benchmark: a random Qwen3 of 3.2 M parameters, prompts, a trivial reward, a configuration.

There are two models. One has no end-of-sequence token, so every answer is as long as allowed. The other ends an answer
at a random token, so lengths are nearly exponential.
"""

from __future__ import annotations

import json
import random
import shutil
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from benchmarks import CACHE
from benchmarks.harness.child_process import run_child

Lengths = Literal["fixed", "long-tailed"]
Dtype = Literal["float32", "bfloat16"]
LENGTHS: tuple[Lengths, ...] = get_args(Lengths)
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
GROUPS, GROUP_SIZE = 32, 8
NUM_ROLLOUTS = GROUPS * GROUP_SIZE
NUM_MINI_BATCHES = 4
PROMPT_LENGTH = 32
# A fixed answer is as long as it may be. A long-tailed one ends where its model samples the end, on average after
# about as many tokens.
MAX_TOKENS: dict[Lengths, int] = {"fixed": 128, "long-tailed": 512}
KV_CACHE_GIB = 1.0
LAGS = (0, 1, 2)
HIDDEN_SIZE, LAYERS = 256, 4
_NUM_PROMPTS = 1024
_MODEL_S = 120.0
_REWARD = '''"""A reward that costs nothing and differs within a group."""


def reward(prompts, completions, **columns):
    return [float(c[0]["content"][:1] < "P") for c in completions]
'''

Message = dict[str, str]


def cases(quick: bool) -> list[tuple[Lengths, Dtype]]:
    """The lengths in each dtype, the long-tailed ones in float32 alone; quick: the first."""
    every = [(lengths, dtype) for lengths in LENGTHS for dtype in (DTYPES if lengths == "fixed" else DTYPES[:1])]
    return every[:1] if quick else every


def model_folder(lengths: Lengths) -> Path:
    """The model of answers of these lengths; written at the first call."""
    return make_model(f"model-{lengths}", hidden_size=HIDDEN_SIZE, layers=LAYERS, ends=lengths != "fixed")


def make_model(name: str, **sizes: Any) -> Path:
    """A model of the cache; a child process writes it at the first call, so that the benchmark loads no torch."""
    folder, unfinished = CACHE / name, CACHE / f"{name}.tmp"
    if not folder.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        run_child(f"{__name__}.write_model", {"folder": str(unfinished), **sizes}, timeout_s=_MODEL_S)
        unfinished.rename(folder)
    return folder


def write_model(folder: str, hidden_size: int, layers: int, ends: bool) -> None:
    """Write a random model; without `ends`, no file of it names an end-of-sequence token. Runs in a child process."""
    from tests.support.tiny_model import make_tiny_model

    for path in make_tiny_model(Path(folder), hidden_size=hidden_size, layers=layers).glob("*.json"):
        content = json.loads(path.read_text())
        if not ends and {"eos_token", "eos_token_id"} & set(content):
            path.write_text(json.dumps({k: v for k, v in content.items() if not k.startswith("eos_token")}, indent=2))


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
    return write_merged(folder, config, sections)


def write_merged(folder: Path, config: dict[str, Any], sections: dict[str, Any]) -> Path:
    """Write a configuration with other keys in some of its sections; its path."""
    for section, keys in sections.items():
        config[section] = {**config.get(section, {}), **keys} if isinstance(keys, dict) else keys
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path
