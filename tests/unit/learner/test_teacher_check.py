"""The refusals of a teacher before a run starts: each names a key of the section `teacher`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo.common.errors import InputError
from gspo.common.model.files import read_model_files
from gspo.common.model.trained_parameters import trained_size
from gspo.common.planning.memory import rank_memory
from gspo.learner.check import check
from tests.support.tiny_model import make_tiny_model, make_tokenizer
from tests.support.training.rollout_rows import make_config


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path, hidden_size=96, layers=3)


def refused(policy: Path, teacher: Path, **sections: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        check(make_config(policy, teacher={"path": str(teacher)}, **sections))
    return caught.value


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_another_size_passes_and_more_tokens_do(policy: Path, teacher: Path) -> None:
    check(make_config(policy, teacher={"path": str(teacher)}))
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>"])
    make_tiny_model(teacher, tokenizer=tokenizer)
    check(make_config(policy, teacher={"path": str(teacher)}))


def test_another_tokenizer_is_refused_with_its_first_difference(policy: Path, teacher: Path) -> None:
    path = teacher / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    path.write_text(json.dumps(tokenizer))
    error = refused(policy, teacher)
    assert error.where == "teacher.path"
    assert "2 tokens differ, the first is id 10, '7' for the policy and '8' for the teacher" in error.rule


def test_another_special_token_is_refused(policy: Path, teacher: Path) -> None:
    path = teacher / "tokenizer.json"
    path.write_text(path.read_text().replace("<|im_end|>", "</s>"))
    assert "the first is id 2, '<|im_end|>' for the policy and '</s>' for the teacher" in refused(policy, teacher).rule


def test_a_teacher_without_rows_for_all_token_ids_is_refused(policy: Path, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    teacher = make_tiny_model(tmp_path / "teacher", tokenizer=tokenizer)
    tokenizer.add_tokens([f"<{number}>" for number in range(5)])
    padded = make_tiny_model(tmp_path / "padded", tokenizer=tokenizer)
    make_tokenizer().save_pretrained(padded)
    error = refused(padded, teacher)
    assert error.where == "teacher.path"
    assert "a vocabulary of 99 rows, and the policy may sample 104 token ids" in error.rule


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_the_teachers(policy: Path, teacher: Path, name: str) -> None:
    (teacher / name).unlink()
    error = refused(policy, teacher)
    assert error.where == "teacher.path" and str(teacher) in error.rule


def test_pickled_weights_need_the_teachers_own_consent(policy: Path, teacher: Path) -> None:
    (teacher / "model.safetensors").rename(teacher / "pytorch_model.bin")
    error = refused(policy, teacher)
    assert "set teacher.allow_pickle: true" in error.fix
    # The policy's consent is not the teacher's.
    assert "pickle" in refused(policy, teacher, model={"path": str(policy), "allow_pickle": True}).rule
    check(make_config(policy, teacher={"path": str(teacher), "allow_pickle": True}))


def test_its_code_needs_the_teachers_own_consent(policy: Path, teacher: Path) -> None:
    edit(teacher / "config.json", model_type="of_its_own", auto_map={"AutoModelForCausalLM": "model.Own"})
    error = refused(policy, teacher, model={"path": str(policy), "trust_remote_code": True})
    assert error.where == "teacher.path" and "set teacher.trust_remote_code" in error.fix
    check(make_config(policy, teacher={"path": str(teacher), "trust_remote_code": True}))


def test_a_shorter_context_is_refused(policy: Path, teacher: Path) -> None:
    edit(teacher / "config.json", max_position_embeddings=100)
    assert "reads at most 100" in refused(policy, teacher).rule


def test_its_memory_is_counted(policy: Path, teacher: Path) -> None:
    """By hand: under bfloat16 its linear layers take two bytes, all else four; ZeRO 3 divides it."""
    files = read_model_files(policy, allow_pickle=False)
    # Three layers: q 96x96, k and v 96x32, o 96x96, three of 96x288.
    rounded = 3 * (2 * 96 * 96 + 2 * 96 * 32 + 3 * 96 * 288)
    others = 99 * 96 + 3 * (2 * 96 + 2 * 32) + 96
    for learner, expected in (
        ({}, 4 * (rounded + others)),
        ({"dtype": "bfloat16"}, 2 * rounded + 4 * others),
        ({"dtype": "bfloat16", "zero_stage": 3}, (2 * rounded + 4 * others) / 2),
    ):
        without, config = (
            make_config(policy, learner=learner, **keys) for keys in ({}, {"teacher": {"path": str(teacher)}})
        )
        memory = rank_memory(config, trained_size(config, files), 2)
        assert memory.teacher == expected
        assert memory.states - rank_memory(without, trained_size(without, files), 2).states == expected
        assert memory.parts_at_peak()["teacher"] == expected
        assert memory.loading == (0 if "zero_stage" in learner else 4 * (rounded + others))


def test_too_large_a_teacher_is_refused(policy: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo.learner.check.free_memory", lambda: 3_000_000)
    assert "with a teacher of 0 M" in refused(policy, teacher).rule
