"""The learner's engine: trains a step's rows, gives out weights and metrics. The one file that imports DeepSpeed."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, distributed

from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.durable_write import fsync
from gspo.common.host.gpus import generators_per_gpu, visible_gpus
from gspo.learner.assembly.rows import Row
from gspo.learner.model.batch import StepBatch
from gspo.learner.model.named_weights import checkpoint_tensors, export_model
from gspo.learner.model.network import can_be_packed, load_policy_model, load_reference_model
from gspo.learner.ranks.launcher import cores_per_rank, num_local_ranks
from gspo.learner.ranks.process_group import join, set_deadlines, sum_stats
from gspo.learner.training.deepspeed_config import engine_config
from gspo.learner.training.gpu_memory import own_fraction
from gspo.learner.training.mismatch_probe import SnapshotWeights
from gspo.learner.training.step_metrics import (
    batch_metrics,
    correction_metrics,
    mismatch_metrics,
    objective_metrics,
    row_metrics,
)
from gspo.learner.training.trainer_api import Hyperparameters, TrainResult, configured_hyperparameters
from gspo.learner.training.updates import StepSums, Updates, mean
from gspo_core.stats import merge

_TAG = "engine"
_STATE, _RANKS = "caller.json", "num_ranks"
_SHARED_MEMORY_OP = "deepspeed_shm_comm"


class Trainer:
    """One rank of the learner. Every rank has the same rows and makes the same calls in the same order.

    The result of a step depends on the weights and moments before it, the rows, the step number and the seed alone.
    """

    def __init__(self, config: Config, model_folder: Path, *, seed: int) -> None:
        self._config, self._folder = config, model_folder
        self._threads = config.learner.threads or cores_per_rank(num_local_ranks())
        torch.set_num_threads(self._threads)
        self._device = _join(config)
        self._rank, self._num_ranks = distributed.get_rank(), distributed.get_world_size()
        self._model = load_policy_model(model_folder, config).to(self._device)
        packing = config.learner.packing and can_be_packed(self._model.causal_lm)
        self._engine = self._start_engine()
        reference = self._start_reference()
        set_deadlines(config.learner.rank_timeout_s)
        snapshot = SnapshotWeights(
            list(self._model.parameters()), lambda parts: self._whole(parts, changed_by=0), is_spread=self._is_spread
        )
        self._updates = Updates(config, self._engine, reference, self._device, snapshot, packing=packing, seed=seed)

    def train(
        self,
        step: int,
        rows: Sequence[Row],
        skip_updates: Collection[int] = (),
        hyperparameters: Hyperparameters | None = None,
    ) -> TrainResult:
        """Train the policy of version step - 1 on rows in training order.

        Args:
            skip_updates: Numbers of the step's updates that the log records as not applied.
            hyperparameters: Of the updates; by default the configured ones of this step.

        Raises:
            NotFiniteError: Too many mini-batches in a row had no finite loss or gradient norm. Others before them were
                applied, so go on from a checkpoint.
        """
        # OpenMP counts threads anew for every thread that calls it.
        torch.set_num_threads(self._threads)
        batch = StepBatch.from_rows(rows)
        hyperparameters = hyperparameters or configured_hyperparameters(self._config, step)
        self._updates.set_hyperparameters(hyperparameters)
        metrics = row_metrics(rows) | batch_metrics(batch, step - 1) | {"learning_rate": hyperparameters.learning_rate}
        sums = self._updates.run(step, batch, skip_updates) if len(batch) else StepSums()
        metrics["mini_batches_not_applied"] = float(len(sums.skipped_updates))
        if sums.targets is None or not sums.losses:
            return TrainResult(metrics, tuple(sums.skipped_updates))
        stats = sum_stats(merge(sums.stats), self._device)
        metrics |= {
            **correction_metrics(batch, sums.targets),
            **objective_metrics(stats),
            **mismatch_metrics(self._config.algorithm, stats, sums.targets.mask_BT.sum(-1)),
            "loss": mean(sums.losses),
            "grad_norm": mean(sums.grad_norms),
        }
        return TrainResult(metrics, tuple(sums.skipped_updates))

    def policy(self) -> dict[str, Tensor]:
        """The weights in the generators' dtype, by checkpoint names, tied ones once: contiguous CPU copies.

        Empty on every rank but rank zero. The ranks gather one weight at a time, so that no rank's device ever holds
        the whole policy.
        """
        return checkpoint_tensors(
            self._model.causal_lm,
            getattr(torch, self._config.generation.dtype),
            self._model.adapters,
            whole=self._whole,
            kept=self._rank == 0,
        )

    def save(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write model and optimizer to `folder`, every rank its part, and the caller's `state`, which is JSON.

        Learning rate and random numbers are functions of the step number, and need no state.
        """
        # Under LoRA the frozen weights are in the model folder.
        self._engine.save_checkpoint(
            str(folder), tag=_TAG, save_latest=False, exclude_frozen_parameters=self._model.adapters is not None
        )
        if self._rank == 0:
            (folder / _STATE).write_text(json.dumps({_RANKS: self._num_ranks, "caller": dict(state)}))
        # On a shared disk only the host that wrote a file can make sure of it.
        for file in folder.rglob("*"):
            fsync(file)
        distributed.barrier()

    def load(self, folder: Path) -> dict[str, Any]:
        """Continue from a checkpoint of `save`; returns the caller's state.

        Without ZeRO every rank holds all of it, so another number of ranks may have written it.

        Raises:
            FileNotFoundError: The folder holds no whole checkpoint.
            InputError: It was written by another number of ranks, each its part.
        """
        written = json.loads((folder / _STATE).read_text())
        stage = self._config.learner.zero_stage
        if stage and written[_RANKS] != self._num_ranks:
            raise InputError(
                "learner.ranks",
                f"{self._num_ranks} is not the number of ranks that wrote the checkpoint {folder}, {written[_RANKS]}; "
                f"under ZeRO {stage} (learner.zero_stage) each wrote its own part of the optimizer",
                f"Start {written[_RANKS]} ranks: only a run with zero_stage 0 can change their number",
            )
        is_whole = self._model.adapters is None
        if self._engine.load_checkpoint(str(folder), tag=_TAG, load_module_strict=is_whole)[0] is None:
            raise FileNotFoundError(f"{folder}: the engine's part of the checkpoint is missing")
        state: dict[str, Any] = written["caller"]
        return state

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder with its tokenizer, in the generators' dtype; replaces `folder`.

        Adapters are merged in, and also stand alone in a folder in it.
        """
        tensors, adapters = self.policy(), self._model.adapters
        with self._whole([] if adapters is None else [p for p in self._model.parameters() if p.requires_grad]):
            if self._rank == 0:
                export_model(self._model.causal_lm, tensors, self._folder, folder, adapters)
        distributed.barrier()

    def _start_engine(self) -> Any:
        learner = self._config.learner
        optimizer = torch.optim.AdamW(
            [parameter for parameter in self._model.parameters() if parameter.requires_grad],
            lr=learner.learning_rate,
            betas=learner.adam_betas,
            weight_decay=learner.weight_decay,
            fused=True,
        )
        return deepspeed.initialize(model=self._model, optimizer=optimizer, config=engine_config(self._config))[0]

    def _start_reference(self) -> Any:
        """The first policy: a frozen copy, spread over the ranks under ZeRO 3, or the base of the adapters."""
        if not self._config.algorithm.needs_reference:
            return None
        if self._model.adapters is not None:
            return self._model.adapters.base_of(self._engine)
        reference = load_reference_model(self._folder, self._config).to(self._device)
        if self._config.learner.zero_stage != 3:
            return reference
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        return deepspeed.initialize(model=reference, config=config)[0]

    @property
    def _is_spread(self) -> bool:
        """Under ZeRO 3 a rank holds a part of every weight."""
        return self._config.learner.zero_stage == 3

    @contextmanager
    def _whole(self, parts: Sequence[Tensor], changed_by: int | None = None) -> Iterator[None]:
        """Gather tensors that are spread over the ranks; a change by rank `changed_by` reaches all of them."""
        with deepspeed.zero.GatheredParameters(list(parts), modifier_rank=changed_by, enabled=self._is_spread):
            yield


def _join(config: Config) -> torch.device:
    """Join the other ranks; returns the device of this one."""
    accelerator = get_accelerator()
    # It serves inference alone. Its build takes a compiler and a minute, and a process killed meanwhile leaves a lock
    # on which every later process would wait for ever.
    deepspeed.ops.__compatible_ops__ = {_SHARED_MEMORY_OP: False}
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))  # DeepSpeed asks the environment, not the group
    accelerator.set_device(local_rank)
    if accelerator.device_name() == "cuda":
        _limit_gpu_memory(config, local_rank)
    join(accelerator.communication_backend_name(), config.learner.rank_timeout_s)
    return torch.device(accelerator.current_device_name())


def _limit_gpu_memory(config: Config, local_rank: int) -> None:
    """Leave the generators their share of this rank's GPU: torch keeps the memory that it has freed."""
    gpus = visible_gpus()
    if local_rank >= len(gpus):
        return  # nvidia-smi does not answer
    fraction = own_fraction(config, gpus[local_rank], generators_per_gpu(gpus)[local_rank])
    if fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction, local_rank)
