"""States that go to the host and come back between steps: training does not notice, and nothing stays behind.

On a CPU the "device" is its memory, so a copy shows every byte, and a storage without memory that all were moved.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo.learner.training import policy_engine
from gspo.learner.training.host_states import HostStates
from gspo.learner.training.rank_control import RankZero
from gspo.learner.training.trainer import Trainer
from gspo.learner.training.trainer_api import configured_hyperparameters
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_config, make_rows, train

FLOAT_BYTES = 4
LONG = pytest.mark.long
# Case -> learner keys, and the floats of each parameter. These are weights, reference and moments, and under ZeRO 3 the
# gradients, in a buffer that stays.
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "zero-0": ({}, 4),
    "zero-1": ({"zero_stage": 1}, 4),
    "zero-2": ({"zero_stage": 2}, 4),
    "zero-3": ({"zero_stage": 3}, 5),
    "zero-3-bfloat16": ({"zero_stage": 3, "dtype": "bfloat16"}, 4.5),
    "zero-2-checkpointing": ({"zero_stage": 2, "gradient_checkpointing": True}, 4),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("policy"), scale=4.0)


@pytest.fixture(autouse=True)
def weights_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights over a mapped file belong to no allocator; on a GPU there are none."""
    for name in ("load_policy_model", "load_reference_model"):
        monkeypatch.setattr(policy_engine, name, _with_own_memory(getattr(policy_engine, name)))


def _with_own_memory(load: Any) -> Any:
    def loaded(*args: Any) -> Any:
        model = load(*args)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return model

    return loaded


def start(folder: Path, learner: dict[str, Any]) -> tuple[Trainer, HostStates]:
    trainer = Trainer(make_config(folder, algorithm={"use_kl_loss": True}, learner=learner), folder)
    return trainer, HostStates([trainer.engine.deepspeed, trainer.engine._reference_model], trainer.engine.device)


def policy_after(trainer: Trainer, folder: Path, steps: range) -> dict[str, Tensor]:
    for step in steps:
        train(trainer, step, make_rows(folder, step=step, num_mini_batches=2))
    return trainer.engine.policy()


def storages() -> dict[int, Tensor]:
    """A tensor of each storage that this process holds."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, Tensor) and thing.device.type == "cpu"]
    return {tensor.untyped_storage()._cdata: tensor for tensor in tensors if tensor.untyped_storage().nbytes()}


@pytest.mark.parametrize("case", ["zero-0", *(pytest.param(name, marks=LONG) for name in CASES if name != "zero-0")])
def test_training_goes_on_to_the_bit_and_nothing_stays_on_the_device(folder: Path, case: str) -> None:
    learner, num_floats = CASES[case]
    expected = policy_after(start(folder, learner)[0], folder, range(1, 4))
    rows = make_rows(folder, step=1, num_mini_batches=2)
    before = storages().keys()
    trainer, states = start(folder, learner)
    num_parameters = sum(tensor.numel() for tensor in expected.values())
    train(trainer, 1, rows)
    for step in (2, 3):
        kept = states.move_to_host()
        assert num_floats * num_parameters <= kept / FLOAT_BYTES < 1.01 * num_floats * num_parameters
        copies = {copy.untyped_storage()._cdata for _, copy in states._away}
        others = [tensor for key, tensor in storages().items() if key not in before and key not in copies]
        assert not [tensor for tensor in others if tensor.is_floating_point() and tensor.numel() > 1]
        states.move_to_device()
        train(trainer, step, make_rows(folder, step=step, num_mini_batches=2))
    assert_same(trainer.engine.policy(), expected)


def test_a_second_move_in_the_same_direction_changes_nothing(folder: Path) -> None:
    trainer, states = start(folder, {"zero_stage": 1})
    before = policy_after(trainer, folder, range(1, 2))
    states.move_to_device()
    assert states.move_to_host() > 0
    assert states.move_to_host() == 0
    states.move_to_device()
    states.move_to_device()
    assert_same(trainer.engine.policy(), before)


def test_tied_weights_and_views_of_flat_buffers_are_still_one(folder: Path) -> None:
    trainer, states = start(folder, {"zero_stage": 2})
    model = trainer.engine.model.causal_lm
    before = {name: parameter.untyped_storage()._cdata for name, parameter in model.named_parameters()}
    assert len(set(before.values())) < len(before), "nothing is a view here"
    states.move_to_host()
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in model.parameters())
    states.move_to_device()
    assert {name: parameter.untyped_storage()._cdata for name, parameter in model.named_parameters()} == before
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_no_call_uses_states_that_are_away(folder: Path, tmp_path: Path) -> None:
    config = make_config(folder, algorithm={"use_kl_loss": True}, learner={"zero_stage": 2})
    zero = RankZero(config, folder, tmp_path)
    policy = zero._trainer.engine.policy
    before = policy()
    zero.move_to_host()
    calls: dict[str, Callable[[], object]] = {
        "train": lambda: zero.train(1, make_rows(folder, step=1), (), configured_hyperparameters(config, 1)),
        "begin_version": lambda: zero.begin_version(1, "", is_reused=False),
        "save": lambda: zero.save(tmp_path / "checkpoint", {}),
        "export": lambda: zero.export(tmp_path / "export"),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=rf"cannot {name}: its states are in host memory, not on the device"):
            call()
    zero.rank_heartbeat()
    zero.move_to_device()
    assert_same(policy(), before)


def assert_same(policy: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert policy.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(policy[name], tensor), name
