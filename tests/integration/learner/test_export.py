"""The trainer's exports in other programs: vLLM and transformers give the same log-probs, peft takes the adapters.

One engine serves the policy trained by LoRA and, after a push, the one trained in full: both are ordinary weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo.common.config.engines import GenerationConfig
from gspo.common.weights.manifest import policy_digest
from gspo.generation.engine.api import Completion, EngineSampling
from gspo.generation.engine.staging import PolicyCopies
from gspo.generation.engine.vllm_engine import Engine, engine_arguments
from gspo.learner.training.trainer import Trainer
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_config, make_rows, train

PROMPTS = [[1, 33, 31, 17, 30, 98, 4 + number, 97, 6 + number] for number in range(8)]
LORA = {"rank": 4, "alpha": 16}


@dataclass(frozen=True)
class Exports:
    """The model that both were trained from, and per kind the trainer and what it exported."""

    base: Path
    trainers: dict[str, Trainer]
    folders: dict[str, Path]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    folder = tmp_path_factory.mktemp("exports")
    base = make_tiny_model(folder / "base", seed=1, scale=4.0)
    trainers, folders = {}, {}
    for kind, learner in (("full", {}), ("lora", {"lora": LORA, "learning_rate": 1e-2})):
        config = make_config(base, algorithm={"pg_clip": 0.5}, learner=learner)
        trainers[kind] = Trainer(config, base)
        train(trainers[kind], 1, make_rows(base))
        folders[kind] = folder / kind
        trainers[kind].engine.export(folders[kind])
    return Exports(base, trainers, folders)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(exports: Exports) -> AsyncIterator[Engine]:
    started = await Engine.start(
        engine_arguments(exports.folders["lora"], GenerationConfig(kv_cache_gb=0.25), max_model_len=128)
    )
    yield started
    await started.stop()


def worst_difference(model: Any, answers: list[Completion]) -> float:
    """Largest distance of a reported log-prob from this model's."""
    worst = 0.0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        logp = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        worst = max(worst, float(np.abs(np.array(answer.logp) - logp.numpy()).max()))
    return worst


async def sampled(engine: Engine) -> list[Completion]:
    how = EngineSampling(max_tokens=40)
    return await asyncio.gather(*(engine.generate(f"r{i}", prompt, how) for i, prompt in enumerate(PROMPTS)))


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


async def test_vllm_loads_what_lora_trained_as_ordinary_weights(exports: Exports, engine: Engine) -> None:
    answers = await sampled(engine)
    assert worst_difference(loaded(exports.folders["lora"]), answers) < 1e-4
    assert worst_difference(loaded(exports.base), answers) > 1e-2, "the adapters are not in the export"


async def test_the_base_with_the_exported_adapters_is_the_exported_model(exports: Exports, engine: Engine) -> None:
    folder = exports.folders["lora"]
    adapted = PeftModel.from_pretrained(loaded(exports.base), folder / "adapter")
    assert worst_difference(adapted.eval(), await sampled(engine)) < 1e-4
    assert not list((folder / "adapter").glob("model*")), "the base's weights are in the adapter's folder"


async def test_a_push_of_merged_weights_takes_hold(exports: Exports, engine: Engine, tmp_path: Path) -> None:
    """And its digest is the learner's: a generator never sees an adapter."""
    trainer = exports.trainers["lora"]
    train(trainer, 2, make_rows(exports.base, step=2))
    trainer.engine.export(tmp_path / "newer")
    await push(engine, exports.folders["lora"], tmp_path / "newer", digest(trainer))
    assert worst_difference(loaded(tmp_path / "newer"), await sampled(engine)) < 1e-4


async def test_a_policy_trained_in_full_gives_the_same_log_probs(exports: Exports, engine: Engine) -> None:
    folder = exports.folders["full"]
    await push(engine, exports.folders["lora"], folder, digest(exports.trainers["full"]))
    answers = await sampled(engine)
    assert worst_difference(loaded(folder), answers) < 1e-4
    assert (
        AutoTokenizer.from_pretrained(folder).chat_template == AutoTokenizer.from_pretrained(exports.base).chat_template
    )


def digest(trainer: Trainer) -> str:
    weights = trainer.engine.policy()
    return policy_digest((name, "float32", tuple(w.shape), w.numpy()) for name, w in weights.items())


async def push(engine: Engine, shared: Path, folder: Path, expected: str) -> None:
    """Stage a folder's weights over those that the engine was started with, and load them."""
    copies, other = PolicyCopies.from_folder(shared, "float32"), PolicyCopies.from_folder(folder, "float32")
    copies.begin(changes=False)
    for name in copies.places:
        copies.write(name, 0, other.serving.bits(name).tobytes())
    assert copies.staged_digest() == expected
    await engine.load(engine.version + 1, copies, on_update="recompute", timeout_s=60)
    copies.close()
    other.close()
