"""The weights that a trainer gives out: a checkpoint's names, copies in one block, gathered layer by layer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gspo.learner.training.trainer import Trainer
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_config, make_rows, train, with_version

GSPO = {"pg_clip": 0.05}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("policy"), scale=4.0)


@pytest.mark.parametrize("tied", [True, False])
def test_the_policy_has_the_names_of_a_checkpoint(tmp_path: Path, tied: bool) -> None:
    folder = make_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    policy = Trainer(make_config(folder, generation={"dtype": "bfloat16"}), folder).engine.policy()
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    assert ("lm_head.weight" in policy) is not tied
    assert policy.keys() == expected.keys() - ({"lm_head.weight"} if tied else set())
    for name, tensor in policy.items():
        assert tensor.is_contiguous() and tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected[name])


def test_a_mixture_s_experts_are_taken_apart_into_one_block(tmp_path: Path) -> None:
    """The loaded model has them in fewer, larger parameters; a second copy of them would be most of a policy."""
    folder = make_tiny_model(tmp_path / "model", num_experts=4)
    policy = Trainer(make_config(folder), folder).engine.policy()
    expected = load_file(folder / "model.safetensors")
    assert any(".experts.3." in name for name in policy)
    assert policy.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name].float()) for name, tensor in policy.items())
    begins = [tensor.data_ptr() for tensor in policy.values()]
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in policy.values()]
    assert max(ends) - min(begins) == sum(tensor.nbytes for tensor in policy.values())


def test_the_policy_is_a_copy(folder: Path) -> None:
    trainer = Trainer(make_config(folder, algorithm=GSPO), folder)
    before = trainer.engine.begin_version(0, "", is_reused=True)().bits
    kept = {name: bits.copy() for name, bits in before.items()}
    train(trainer, 1, make_rows(folder))
    after = trainer.engine.begin_version(1, "", is_reused=True)().bits
    assert all((kept[name] == bits).all() for name, bits in before.items())
    assert any((kept[name] != bits).any() for name, bits in after.items())


def test_under_zero_3_the_policy_is_gathered_one_layer_at_a_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a push and an export. Each rank keeps its part of the snapshot under a lag, so none has the whole policy."""
    trainer = Trainer(make_config(folder, algorithm=GSPO, learner={"zero_stage": 3}), folder)
    gathered = []

    class CountingGather(deepspeed.zero.GatheredParameters):  # type: ignore[misc]
        def __init__(self, params: Any, *args: Any, **words: Any) -> None:
            gathered.append(sum(p.ds_numel for p in params))
            super().__init__(params, *args, **words)

    monkeypatch.setattr(deepspeed.zero, "GatheredParameters", CountingGather)
    numels = Counter[str]()
    for name, tensor in trainer.engine.policy().items():
        numels[".".join(name.split(".")[:3])] += tensor.numel()
    embedding, layer = (numels[name] for name in ("model.embed_tokens.weight", "model.layers.0"))
    assert sorted(gathered) == sorted(numels.values())
    trainer.engine.export(tmp_path / "export")
    train(trainer, 4, with_version(make_rows(folder, step=4), 2))
    train(trainer, 5, with_version(make_rows(folder, step=5), 3))
    assert max(gathered) == max(embedding, layer)
    assert sum(numel == embedding for numel in gathered) == 2
