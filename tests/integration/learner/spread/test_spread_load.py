"""Under ZeRO 3 a rank loads its parts of the policy, never the whole: the same weights, in the memory of a part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo.common.errors import InputError
from gspo.learner.push.policy_weights import weights_from
from gspo.learner.training.policy_engine import PolicyEngine
from tests.support.tiny_model import make_tiny_model
from tests.support.training.load_cases import CASES
from tests.support.training.rollout_rows import make_config
from tests.support.training.started_ranks import run_ranks

pytestmark = pytest.mark.timeout(300)
FLOAT32_BYTES = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    tied = make_tiny_model(folder / "tied")
    return {
        "large": in_bfloat16(make_tiny_model(folder / "large", hidden_size=768, layers=8)),
        "tied": tied,
        "untied": make_tiny_model(folder / "untied", tie_word_embeddings=False),
        "mixture": make_tiny_model(folder / "mixture", num_experts=4),
        "adapters": tied,
    }


def in_bfloat16(folder: Path) -> Path:
    """As models are published: a rank has to convert every tensor, into memory of its own."""
    file = folder / "model.safetensors"
    save_file({name: it.bfloat16() for name, it in load_file(file).items()}, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def loaded(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of two ranks in every case."""
    out = tmp_path_factory.mktemp("loaded")
    words = [f"{name}={path}" for name, path in models.items()]
    run_ranks(2, "tests.support.training.load_cases", out, *words, timeout_s=240)
    return out


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_load_the_weights_of_one(loaded: Path, models: dict[str, Path], case: str) -> None:
    whole = PolicyEngine(make_config(models[case]), models[case]).policy()
    assert json.loads((loaded / "digests.json").read_text())[case] == weights_from(0, whole).digest


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_starts_in_the_memory_of_its_part(loaded: Path, models: dict[str, Path], rank: int) -> None:
    """A half each of weights, gradients and one moment, and less than as much beside them at any moment.

    A rank that loads the whole policy first takes more than three of them.
    """
    whole = FLOAT32_BYTES * sum(it.numel() for it in load_file(models["large"] / "model.safetensors").values())
    peak = json.loads((loaded / f"peak-{rank}.json").read_text())["large"]
    assert 1.25 * whole < peak < 2 * whole


def test_a_model_that_lacks_a_weight_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    for stage in (0, 3):
        with pytest.raises(InputError, match=r"lacks 1 weights, such as model\.layers\.1\.mlp\.up_proj"):
            PolicyEngine(make_config(folder, learner={"zero_stage": stage}), folder)


def test_under_zero_3_too_embeddings_that_differ_are_not_tied(tmp_path: Path) -> None:
    """The configuration says that they are one, and the files that they are two."""
    folder = make_tiny_model(tmp_path, tie_word_embeddings=False)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"tie_word_embeddings": True}))
    expected = load_file(folder / "model.safetensors")
    engine = PolicyEngine(make_config(folder, learner={"zero_stage": 3}), folder)
    embedding, head = (
        layer.weight for layer in (engine.model.causal_lm.get_input_embeddings(), engine.model.causal_lm.lm_head)
    )
    with engine._whole([embedding, head]):
        assert torch.equal(embedding, expected["model.embed_tokens.weight"])
        assert torch.equal(head, expected["lm_head.weight"])
