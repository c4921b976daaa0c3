"""The configuration that DeepSpeed is given: what our keys say, and the user's `learner.deepspeed` merged into it.

It imports no DeepSpeed, so that a configuration can be checked in milliseconds. Neighbours: check.py asks for it to
find contradictions, trainer.py to start the engine.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from services.common.config import Config
from services.common.errors import InputError

# DeepSpeed's key -> the way to say it here. Where the value is given by us too, an equal one is no contradiction.
_OURS = {
    "train_batch_size": "the batch is algorithm.rollout_batch_size groups",
    "train_micro_batch_size_per_gpu": "set learner.micro_batch_tokens",
    "gradient_accumulation_steps": "set learner.micro_batch_tokens and algorithm.num_mini_batches",
    "managed_gradient_accumulation": "the trainer marks where an optimizer step ends",
    "optimizer": "set learner.learning_rate, weight_decay and adam_betas",
    "scheduler": "set learner.schedule and learner.warmup_steps",
    "gradient_clipping": "set learner.max_grad_norm",
    "fp16": "set learner.dtype",
    "bf16": "set learner.dtype",
    "torch_autocast": "set learner.dtype",
    "data_types": "gradients add up in float32",
    "zero_force_ds_cpu_optimizer": "the optimizer is torch's AdamW",
    "zero_optimization.stage": "set learner.zero_stage",
}


def engine_config(config: Config) -> dict[str, Any]:
    """DeepSpeed's configuration of this run.

    Raises:
        InputError: `learner.deepspeed` says what one of our keys says, otherwise, or holds a key that is none.
    """
    learner = config.learner
    _refuse_unknown(learner.deepspeed)
    ours = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # At stage 0 the trainer clips: it has to see the norm before the step, and needs it only once.
        "gradient_clipping": learner.max_grad_norm if learner.zero_stage else 0.0,
        "zero_optimization": {"stage": learner.zero_stage},
        "zero_force_ds_cpu_optimizer": False,
    }
    for key, instead in _OURS.items():
        given, mine = _at(learner.deepspeed, key), _at(ours, key)
        if given is not None and given != mine:
            raise InputError(
                f"learner.deepspeed.{key}", f"{given!r} contradicts our own keys", f"Leave it out; {instead}"
            )
    return _merged(ours, learner.deepspeed)


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    """DeepSpeed itself passes over a key that it does not know, so a slip of the pen would change nothing."""
    for key, value in given.items():
        if key not in known_names():
            match = difflib.get_close_matches(key, known_names(), n=1)
            fix = f"Did you mean '{match[0]}'?" if match else "Leave it out"
            raise InputError(f"learner.deepspeed.{key}", f"{value!r}: the installed DeepSpeed knows no such key", fix)


@cache
def known_names() -> frozenset[str]:
    """Every name in DeepSpeed's own files on its configuration: its keys, and more.

    ModuleNotFoundError without DeepSpeed.
    """
    package = importlib.util.find_spec("deepspeed")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("deepspeed is not installed; install the `cpu` or `cuda` extra", name="deepspeed")
    folder = Path(package.submodule_search_locations[0])
    files = [path for path in folder.rglob("*.py") if path.name in ("config.py", "constants.py")]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return frozenset(text for text in texts if text.isidentifier())


def _at(mapping: Mapping[str, Any], dotted: str) -> Any:
    value: Any = mapping
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _merged(ours: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(ours)
    for key, value in given.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
