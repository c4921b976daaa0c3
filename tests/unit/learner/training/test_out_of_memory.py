"""A step that runs out of memory: the record of it, and the next process, which makes the step in smaller parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.telemetry.activity import Activity
from gspo.learner.push.policy_weights import PolicyWeights, weights_from
from gspo.learner.ranks.out_of_memory import ShortageRecords, StepOutOfMemoryError
from gspo.learner.ranks.process_group import RanksError
from gspo.learner.recovery import hyperparameters_of, recover
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.training.rank_control import RankZero
from gspo.learner.training.trainer import Trainer
from gspo.learner.training.trainer_api import configured_hyperparameters
from gspo.runlog.memory_shortages import shortage_line
from gspo.runlog.run_log import RunLog
from tests.support.monitoring.recorded_shortage import SHORTAGE
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_config, make_rows, train

ALGORITHM = {"pg_clip": 0.05}
MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


class SmallDevice:
    """Memory for micro-batches of so many positions; with a larger one, a part of the mini-batch fails.

    Args:
        num_first: Micro-batches of a process that fit in any case.
    """

    def __init__(self, part: str, positions: int, num_first: int = 0) -> None:
        self._part, self._positions, self._num_first = part, positions, num_first
        self._num_seen, self._is_full = 0, False

    def start(self, config: Config, model: Path, run_dir: Path) -> RankZero:
        """The trainer on this device, in a new process."""
        ranks, self._num_seen, self._is_full = RankZero(config, model, run_dir), 0, False
        policy = ranks._trainer.engine.model
        policy.register_forward_pre_hook(self._forward)
        policy.register_forward_hook(self._hook_backward)
        return ranks

    @contextmanager
    def optimizer(self) -> Iterator[None]:
        """A block in which optimizer steps may fail."""
        handle = register_optimizer_step_pre_hook(lambda *_: self._fail("optimizer"))
        yield
        handle.remove()

    def _forward(self, _policy: object, model_input: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            self._num_seen += 1
            self._is_full = self._num_seen > self._num_first and model_input[0].numel() > self._positions
            self._fail("forward")

    def _hook_backward(self, _policy: object, _input: object, output: tuple[torch.Tensor, ...]) -> None:
        if output[0].requires_grad:
            output[0].register_hook(lambda _: self._fail("backward"))  # type: ignore[no-untyped-call]

    def _fail(self, part: str) -> None:
        if self._is_full and part == self._part:
            raise torch.OutOfMemoryError(MEMORY)


def recovered(config: Config, folder: Path, path: Path, device: SmallDevice) -> PolicyWeights:
    """The last version of a run, made by one process."""
    with RunDir(path) as run, device.optimizer():
        return recover(config, folder, run, Activity("learner"), device.start).weights


def logged_run(path: Path, folder: Path, num_steps: int = 2) -> Path:
    """A run whose steps are logged and not trained; each has four mini-batches of at most 231 positions."""
    with RunDir(path) as run:
        for step in range(1, num_steps + 1):
            run.write_step(step, [replace(row, group=row.group + 8 * step) for row in make_rows(folder, step=step)])
    return path


@pytest.mark.parametrize(("part", "zero_stage"), [("forward", 0), ("backward", 2), ("optimizer", 3)])
def test_a_step_is_made_again_from_the_state_before_it_with_half_the_micro_batch(
    folder: Path, tmp_path: Path, part: str, zero_stage: int
) -> None:
    """Its first mini-batch was applied before; and the step before it is replayed with the micro-batch that it had."""
    config = make_config(folder, algorithm=ALGORITHM, learner={"zero_stage": zero_stage})
    path, device = logged_run(tmp_path / "run", folder), SmallDevice(part, 200, num_first=5)
    with pytest.raises(StepOutOfMemoryError, match="step 2 ran out of memory on rank 0 with a micro-batch of 231 tok"):
        recovered(config, folder, path, device)
    (shortage,) = RunLog(path).shortages()
    assert (shortage.micro_batch_tokens, shortage.gradient_checkpointing, shortage.error) == (115, False, MEMORY)
    version = recovered(config, folder, path, device)

    rows, plain = {step: make_rows(folder, step=step) for step in (1, 2)}, Trainer(config, folder)
    train(plain, 1, rows[1])
    small = replace(configured_hyperparameters(config, 2), micro_batch_tokens=115)
    plain.train(2, rows[2], (), small)
    assert version.digest == weights_from(2, plain.engine.policy()).digest
    with RunDir(path) as run:
        recorded = [run.versions[step].hyperparameters for step in (1, 2)]
    assert recorded == [asdict(configured_hyperparameters(config, 1)), asdict(small)]


def test_micro_batches_are_halved_down_to_a_rollout_then_checkpointed_then_the_run_ends(
    folder: Path, tmp_path: Path
) -> None:
    config = make_config(folder, algorithm=ALGORITHM)
    path, device, sentences = logged_run(tmp_path / "run", folder, num_steps=1), SmallDevice("forward", 0), []
    for _ in range(4):
        with pytest.raises(StepOutOfMemoryError) as again:
            recovered(config, folder, path, device)
        sentences.append(str(again.value).partition("; ")[2])
    assert sentences == [
        *(f"it is tried again with {num_tokens}" for num_tokens in (115, 56, 44)),
        "it is tried again with gradient checkpointing",
    ]
    with pytest.raises(InputError, match="step 1 ran out of memory on rank 0 with a micro-batch of 44 tokens") as ended:
        recovered(config, folder, path, device)
    assert ended.value.where == "learner.micro_batch_tokens"
    assert ended.value.fix.startswith("Resume with learner.offload, a higher learner.zero_stage, or more learner.ranks")
    shortages = RunLog(path).shortages()
    assert [it.is_last for it in shortages] == [False] * 4 + [True]
    assert shortage_line(shortages) == f"{shortages[-1].sentence} (5 times in this run)"
    # A resume with another of these keys begins with the configured micro-batches.
    resumed = make_config(folder, algorithm=ALGORITHM, learner={"zero_stage": 1})
    assert hyperparameters_of(resumed, 1, None, shortages) == configured_hyperparameters(resumed, 1)
    used = hyperparameters_of(config, 2, None, shortages)
    assert (used.micro_batch_tokens, used.gradient_checkpointing) == (44, True)


def test_a_rank_that_loses_another_one_ends_for_the_reason_of_that_one(folder: Path, tmp_path: Path) -> None:
    run = logged_run(tmp_path / "run", folder, num_steps=1)
    other, own = ShortageRecords(run), ShortageRecords(run)
    with pytest.raises(RanksError), own.recording():
        raise RanksError("connection closed")
    with pytest.raises(StepOutOfMemoryError), other.recording():
        raise StepOutOfMemoryError(SHORTAGE)
    with pytest.raises(StepOutOfMemoryError, match="step 3 ran out of memory"), own.recording():
        raise RanksError("connection closed")
    with pytest.raises(RanksError), ShortageRecords(run).recording():
        raise RanksError("connection closed")
