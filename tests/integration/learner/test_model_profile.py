"""The counts of a model on tensors without data, against the loaded model; and the process that counts them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.learner.model_types import tiny_model
from gspo.common.config.engines import LoraConfig
from gspo.common.errors import InputError
from gspo.common.model.files import read_model_files
from gspo.common.model.trained_parameters import num_trained
from gspo.common.planning.model_profile import ModelProfile, profile_model
from gspo.learner.model import profile as counting
from gspo.learner.model.attention import attend_to, attention_name, has_own_attention
from gspo.learner.model.flop_counts import count_flops
from gspo.learner.model.network import EXPERTS, load_policy_model
from gspo.learner.model.profile import _saved_bytes
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_config

_TOKENS, _RANK = 2048, 4


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of this module's own."""
    folder = tmp_path_factory.mktemp("cache")
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(folder))
    yield folder
    patch.undo()


@pytest.fixture(scope="module", params=[0, 4], ids=["dense", "mixture"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_dir = tmp_path_factory.mktemp("model")
    make_tiny_model(model_dir, num_experts=request.param)
    return model_dir


@pytest.fixture(scope="module")
def profile(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelProfile:
    """Counted from config.json alone."""
    alone = tmp_path_factory.mktemp("alone")
    shutil.copy(folder / "config.json", alone)
    return profile_model(alone)


def test_a_profile_counts_what_the_loaded_model_has(folder: Path, profile: ModelProfile) -> None:
    causal_lm = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention_name(), experts_implementation=EXPERTS
    )
    text, files = causal_lm.config, read_model_files(folder, allow_pickle=False)
    assert profile.num_parameters == causal_lm.num_parameters()
    projections = [weight for name, weight in causal_lm.named_parameters() if "_proj" in name]
    assert profile.num_rounded == sum(weight.numel() for weight in projections)
    assert profile.largest_weight == max(weight.numel() for weight in causal_lm.parameters())
    assert profile.flops == count_flops(causal_lm)
    assert profile.num_layers == text.num_hidden_layers
    assert (profile.vocabulary, profile.width) == (text.vocab_size, text.hidden_size)
    attend_to(None)
    keys_RHSD = causal_lm(torch.zeros(1, 7, dtype=torch.long), use_cache=True).past_key_values.layers[0].keys
    assert profile.num_kv * 7 == 2 * text.num_hidden_layers * keys_RHSD.numel()
    assert profile.num_heads == text.num_attention_heads
    assert profile.num_kv_heads == keys_RHSD.shape[1]
    assert profile.num_adapted * _RANK == num_trained(LoraConfig(rank=_RANK), files)
    # The same bytes are saved where tensors have data.
    fixed, a_token, a_pair = profile.saved_bytes["bfloat16"]
    assert a_pair == 0
    assert _saved_bytes(causal_lm.train(), torch.bfloat16, 1024, _TOKENS // 1024) == fixed + a_token * _TOKENS


def test_a_model_whose_lines_no_ranks_share(tmp_path: Path, profile: ModelProfile) -> None:
    """One with sinks in its attention; `gspo plan` divides no line of it."""
    tiny_model("gpt_oss").config.save_pretrained(tmp_path)
    with_sinks = profile_model(tmp_path)
    assert (with_sinks.can_share(1), with_sinks.can_share(2), profile.can_share(2)) == (True, False, True)


@pytest.mark.parametrize("kind", ["gpt_oss", "gpt_neo", "glm_moe_dsa"])
def test_an_attention_of_its_own_keeps_a_square_of_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As a run: the learner leaves these models their own attention, and pads their rows."""
    monkeypatch.setattr(counting, "_OWN_ROW", 12)
    causal_lm = tiny_model(kind)
    causal_lm.save_pretrained(tmp_path)
    fixed, a_token, a_pair = counting.profile(tmp_path).saved_bytes["bfloat16"]
    loaded = load_policy_model(tmp_path, make_config(tmp_path)).causal_lm
    assert has_own_attention(loaded) and a_pair > 0
    row, num_rows = 40, 3
    counted = fixed + (a_token + a_pair * row) * row * num_rows
    # Positions and masks are the same for all rows, and counted for each.
    assert 0.95 * counted < _saved_bytes(loaded, torch.bfloat16, row, num_rows) <= counted


def test_a_model_without_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile of Mamba takes some of its tokens alone, which it computes one after another."""
    monkeypatch.setattr(counting, "_SCANNED_TOKENS", (8, 16))
    causal_lm = tiny_model("mamba")
    causal_lm.config.save_pretrained(tmp_path)
    counted = counting.profile(tmp_path)
    assert (counted.num_heads, counted.num_kv_heads, counted.num_kv) == (0, 1, 1)
    assert counted.flops == count_flops(causal_lm)
    assert counted.flops.attention == {}
    fixed, a_token, a_pair = counted.saved_bytes["float32"]
    causal_lm.set_attn_implementation(attention_name())
    assert (a_pair, _saved_bytes(causal_lm.train(), torch.float32, 12, 2)) == (0, fixed + 24 * a_token)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "deepseek_v3", "mamba2"])
def test_one_of_equal_layers_stands_for_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    causal_lm = tiny_model(kind).train()
    causal_lm.set_attn_implementation(attention_name())
    attend_to(None)
    counted = _saved_bytes(causal_lm, torch.bfloat16, 32, 2)
    monkeypatch.setattr(counting, "_kind", id)
    assert counted == _saved_bytes(causal_lm, torch.bfloat16, 32, 2)


def test_a_profile_survives_its_text(profile: ModelProfile) -> None:
    assert ModelProfile.from_json(profile.to_json()) == profile
    for line in ("", "[]", "{}", profile.to_json()[:-1], '{"flops": {}}'):
        with pytest.raises(ValueError, match=r"."):
            ModelProfile.from_json(line)


def test_a_profile_is_counted_once(folder: Path, cache: Path, profile: ModelProfile, tmp_path: Path) -> None:
    kept = [path for path in cache.rglob("*.json") if ModelProfile.from_json(path.read_text()) == profile]
    assert len(kept) == 1
    changed = profile.to_json().replace('"num_layers": 2', '"num_layers": 3')
    kept[0].write_text(changed)
    assert profile_model(folder) == ModelProfile.from_json(changed)  # from the cache
    kept[0].write_text("broken")
    assert profile_model(folder) == profile
    assert kept[0].read_text() == profile.to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no config.json"),
        ('{"model_type": "nonsense"}', "is a model of type 'nonsense', which the installed transformers does not know"),
        ('{"model_type": "bert", "hidden_size": 24, "is_decoder": true}', "changes its logits after the output layer"),
        ('{"model_type": "gpt2", "n_layer": 0, "n_embd": 12, "vocab_size": 9}', "ValueError: it has no layers"),
        ('{"model_type": "gpt2", "n_embd": "big"}', r"config.json .* Field 'n_embd' expected int, got str"),
        ('{"model_type": "mpt", "n_heads": 3}', r"its config.json cannot be counted \((?!.*File )\w+Error: "),
    ],
)
def test_a_folder_without_a_model_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=message):
        profile_model(tmp_path)


@pytest.mark.parametrize("kind", ["opt", "bart"])
def test_a_model_that_may_leave_layers_out_in_training_is_counted(tmp_path: Path, kind: str) -> None:
    causal_lm = tiny_model(kind)
    causal_lm.config.save_pretrained(tmp_path)
    assert counting.profile(tmp_path).flops == count_flops(causal_lm)


@pytest.mark.parametrize("kind", ["gemma2", "phi", "cohere"])
def test_logits_that_change_after_the_output_layer_are_refused_without_weights(tmp_path: Path, kind: str) -> None:
    tiny_model(kind).config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="changes its logits after the output layer"):
        counting.profile(tmp_path)
