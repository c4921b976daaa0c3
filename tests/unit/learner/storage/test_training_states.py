"""The files that a trainer writes: their states, who may read them, and a checkpoint of another version of gspo."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from gspo.common.errors import InputError
from gspo.learner.training.trainer import Trainer
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_config, make_rows, train


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder = make_tiny_model(tmp_path_factory.mktemp("policy"))
    trainer = Trainer(make_config(folder, learner={"lora": {"rank": 2}}), folder)
    train(trainer, 1, make_rows(folder))
    return trainer


def test_a_step_between_copy_and_write_changes_nothing_of_a_checkpoint(trainer: Trainer, tmp_path: Path) -> None:
    """The states that come back train the same step to the same bits, so the moments are those of the copy too."""
    model = Path(trainer._config.model.path)
    copied, write = trainer.engine.policy(), trainer.engine.begin_save(tmp_path, {"of": 1})
    train(trainer, 2, make_rows(model, step=2))
    trained = trainer.engine.policy()
    write(lambda: False)
    assert trainer.engine.load(tmp_path) == {"of": 1}
    assert_equal(trainer.engine.policy(), copied)
    train(trainer, 2, make_rows(model, step=2))
    assert_equal(trainer.engine.policy(), trained)
    assert any(not torch.equal(copied[name], tensor) for name, tensor in trained.items())


def assert_equal(present: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert present.keys() == expected.keys()
    assert all(torch.equal(present[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_the_umask_says_who_may_read_checkpoints_and_exports(trainer: Trainer, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        trainer.engine.save(tmp_path / "whole", {})
        trainer.engine.begin_save(tmp_path / "beside", {})(lambda: False)
        trainer.engine.export(tmp_path / "export")
    finally:
        os.umask(before)
    modes = {path.relative_to(tmp_path).as_posix(): path.stat().st_mode for path in tmp_path.rglob("*.safetensors")}
    states = "rank-00000-0000.safetensors"
    model = {"export/model.safetensors", "export/adapter/adapter_model.safetensors"}
    assert modes.keys() == {f"whole/{states}", f"beside/{states}", *model}
    assert {oct(mode & 0o777) for mode in modes.values()} == {oct(0o666 & ~umask)}


def test_a_checkpoint_in_deepspeed_s_form_is_refused_with_the_fix(trainer: Trainer, tmp_path: Path) -> None:
    """As earlier versions wrote it."""
    (tmp_path / "engine").mkdir()
    torch.save({"module": {}}, tmp_path / "engine" / "mp_rank_00_model_states.pt")
    (tmp_path / "caller.json").write_text(json.dumps({"num_ranks": 1, "caller": {}}))
    with pytest.raises(InputError) as caught:
        trainer.engine.load(tmp_path)
    assert caught.value.where == str(tmp_path)
    assert "another version of gspo wrote this checkpoint" in caught.value.rule
    assert "Resume with that version" in caught.value.fix
