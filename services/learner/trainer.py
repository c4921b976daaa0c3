"""The learner's engine: a step's rows in, new weights and figures out. The one file that imports DeepSpeed.

It reads no stream, writes no log and keeps no clock: the loop does. Neighbours: batch.py and objective.py say what is
computed, policy_model.py holds the network, loop.py calls it from one thread.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, distributed
from torch._C._distributed_c10d import HashStore

from gspo_core.figures import mismatch_stats
from gspo_core.staleness import drop_old_tokens
from gspo_core.stats import Stats, merge
from services.common.config import Config
from services.learner.batch import MicroBatch, StepBatch, rank_micro_batches
from services.learner.engine_config import engine_config
from services.learner.export import export_model
from services.learner.objective import Targets, micro_batch_loss, step_targets
from services.learner.policy_model import PolicyModel, checkpoint_tensors, load_policy_model
from services.learner.rows import Row
from services.learner.schedule import learning_rate
from services.learner.step_figures import batch_figures, mismatch_figures, objective_figures, row_figures

_TAG = "engine"
_STATE = "caller.json"
_SHARED_MEMORY_OP = "deepspeed_shm_comm"
# Any odd number beyond the steps of a run: seeds of steps and ranks do not meet.
_SEED_STRIDE = 1_000_003


class NotFiniteError(ArithmeticError):
    """A loss or gradient norm is no finite number: neither this optimizer step nor any after it was made.

    Attributes:
        step: The training step.
        mini_batch: Its optimizer step, from 0.
    """

    def __init__(self, step: int, mini_batch: int, what: str, value: float) -> None:
        super().__init__(f"step {step}, mini-batch {mini_batch}: the {what} is {value}; it was not applied")
        self.step, self.mini_batch = step, mini_batch


@dataclass(frozen=True)
class _Update:
    """One optimizer step: its loss over all ranks, the gradient norm before the clip, this rank's sums."""

    loss: float
    grad_norm: float
    stats: Stats


class Trainer:
    """One rank of the learner. Every rank is given the same rows and makes the same calls in the same order.

    What a step makes depends on the weights and moments before it, the rows, the step number and the seed alone.
    """

    def __init__(self, config: Config, model_folder: Path, *, seed: int) -> None:
        self._config, self._folder, self._seed = config, model_folder, seed
        self._threads = config.learner.threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(self._threads)
        _join_ranks()
        self._rank, self._num_ranks = distributed.get_rank(), distributed.get_world_size()
        self._device = torch.device(get_accelerator().current_device_name())
        self._model = load_policy_model(model_folder, config).to(self._device)
        self._reference = self._frozen_copy() if config.algorithm.needs_reference else None
        self._engine = self._start_engine()

    def train(self, step: int, rows: Sequence[Row]) -> dict[str, float]:
        """Train the policy of version step - 1 on rows in training order; returns the step's figures.

        Raises:
            NotFiniteError: A mini-batch has no finite loss or gradient norm. Those before it were applied, so go on
                from a checkpoint.
        """
        # OpenMP counts threads anew for every thread that calls it.
        torch.set_num_threads(self._threads)
        # Dropout, where a model has any, depends on seed, step and rank, so a replay draws the same.
        torch.manual_seed((self._seed * _SEED_STRIDE + step) * _SEED_STRIDE + self._rank)
        batch = StepBatch.from_rows(rows)
        rate = self._set_learning_rate(step)
        report = {**row_figures(rows), **batch_figures(batch, step - 1), "learning_rate": rate}
        if not len(batch):
            return report
        updates, mismatch = self._update(step, batch)
        stats = self._sum_stats(merge([*(update.stats for update in updates), mismatch]))
        return {
            **report,
            **objective_figures(stats),
            **mismatch_figures(self._config.algorithm, stats),
            "loss": _mean([update.loss for update in updates]),
            "grad_norm": _mean([update.grad_norm for update in updates]),
        }

    def policy(self) -> dict[str, Tensor]:
        """The weights in the generators' dtype, by checkpoint names, tied ones once: contiguous CPU copies."""
        with self._whole_weights():
            return checkpoint_tensors(self._model.causal_lm, getattr(torch, self._config.generation.dtype))

    def save(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write model and optimizer to `folder`, every rank its part, and the caller's `state`, which is JSON.

        Learning rate and random numbers are functions of the step number: nothing of them needs keeping.
        """
        self._engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False)
        if self._rank == 0:
            (folder / _STATE).write_text(json.dumps(state))

    def load(self, folder: Path) -> dict[str, Any]:
        """Go on from what `save` wrote with the same number of ranks; returns the caller's state.

        Raises:
            FileNotFoundError: The folder holds no whole checkpoint.
        """
        state: dict[str, Any] = json.loads((folder / _STATE).read_text())
        if self._engine.load_checkpoint(str(folder), tag=_TAG)[0] is None:
            raise FileNotFoundError(f"{folder}: the engine's part of the checkpoint is missing")
        return state

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder with its tokenizer, in the generators' dtype; replaces `folder`."""
        dtype = getattr(torch, self._config.generation.dtype)
        with self._whole_weights():
            if self._rank == 0:
                export_model(self._model.causal_lm, self._folder, folder, dtype)
        distributed.barrier()

    def _update(self, step: int, batch: StepBatch) -> tuple[list[_Update], Stats]:
        """All optimizer steps of a step, and the mismatch with the generators before the first of them."""
        cuts = self._cut(batch)
        targets, mismatch = self._targets(step, batch, cuts)
        updates: list[_Update] = []
        for _ in range(self._config.algorithm.ppo_epochs):
            for mini_batch, cut in cuts.items():
                # Only the first forwards of a step are made at the weights that sampled its newest tokens.
                fresh_BT = None if updates or mismatch else _fresh_tokens(step, batch)
                loss, stats = self._backward(batch.mini_batch_B == mini_batch, cut, targets, batch, fresh_BT)
                if not math.isfinite(loss):
                    raise NotFiniteError(step, mini_batch, "loss", loss)
                updates.append(_Update(loss, self._apply(step, mini_batch), stats))
        return updates, mismatch

    def _cut(self, batch: StepBatch) -> dict[int, list[MicroBatch]]:
        """This rank's micro-batches of every mini-batch."""
        cuts = {}
        for mini_batch in sorted(set(batch.mini_batch_B.tolist())):
            rows = (batch.mini_batch_B == mini_batch).nonzero()[:, 0].tolist()
            max_tokens = self._config.micro_batch_tokens
            cut = rank_micro_batches(batch, rows, max_tokens, rank=self._rank, num_ranks=self._num_ranks)
            cuts[mini_batch] = [micro.to(self._device) for micro in cut]
        return cuts

    def _targets(self, step: int, batch: StepBatch, cuts: Mapping[int, Sequence[MicroBatch]]) -> tuple[Targets, Stats]:
        """What the step's log-probs are held against; under `recompute` also the mismatch with the generators."""
        algorithm = self._config.algorithm
        reference_BT = None if self._reference is None else self._score(self._reference, batch, cuts)
        if algorithm.old_logprobs == "inference":
            return step_targets(algorithm, batch, batch.behavior_BT, reference_BT), {}
        old_BT = self._score(self._engine, batch, cuts)
        mismatch = mismatch_stats(old_BT, batch.behavior_BT, _fresh_tokens(step, batch))
        # Every rank has the whole batch here, and the sums are added up over the ranks.
        return step_targets(algorithm, batch, old_BT, reference_BT), mismatch if self._rank == 0 else _zeros(mismatch)

    @torch.no_grad()
    def _score(self, model: torch.nn.Module, batch: StepBatch, cuts: Mapping[int, Sequence[MicroBatch]]) -> Tensor:
        """Log-probs [B, T] of the whole step at the model's present weights, on every rank."""
        logp_BT = torch.zeros_like(batch.behavior_BT)
        model.eval()
        for micro in (micro for cut in cuts.values() for micro in cut):
            logp_N, _ = model(micro.input_RS, micro.state_N, micro.target_N)
            logp_BT[micro.row_R, : micro.width] += micro.spread(logp_N).cpu()
        model.train()
        return self._sum_over_ranks(logp_BT)

    def _backward(
        self, of_step_B: Tensor, cut: Sequence[MicroBatch], targets: Targets, batch: StepBatch, fresh_BT: Tensor | None
    ) -> tuple[float, Stats]:
        """Gradients of one optimizer step; returns its loss over all ranks and this rank's sums."""
        counted_BT = targets.mask_BT[of_step_B]
        num_sequences, num_tokens = int(counted_BT.any(-1).sum()), int(counted_BT.sum())
        losses, sums = [], []
        for micro in cut:
            self._engine.set_gradient_accumulation_boundary(micro is cut[-1])
            logp_N, entropy_N = self._engine(micro.input_RS, micro.state_N, micro.target_N)
            logp_RT, entropy_RT = micro.spread(logp_N), micro.spread(entropy_N.detach())
            part = micro_batch_loss(
                self._config.algorithm,
                micro,
                logp_RT,
                entropy_RT,
                targets,
                num_sequences=num_sequences,
                num_tokens=num_tokens,
            )
            # DeepSpeed averages gradients over the ranks; N and M count all ranks, so their sum is wanted.
            self._engine.backward(part.loss * self._num_ranks)
            losses.append(part.loss.detach())
            sums.append(part.stats)
            if fresh_BT is not None:
                sums.append(mismatch_stats(logp_RT, micro.take(batch.behavior_BT), micro.take(fresh_BT)))
        return float(self._sum_over_ranks(torch.stack(losses).sum())), merge(sums)

    def _apply(self, step: int, mini_batch: int) -> float:
        """Clip and update; returns the gradient norm before the clip. A norm that is not finite updates nothing."""
        if self._config.learner.zero_stage:
            self._engine.step()
            if self._engine.optimizer.overflow:
                raise NotFiniteError(step, mini_batch, "gradient norm", math.nan)
            return float(self._engine.get_global_grad_norm())
        parameters = [p for p in self._model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not math.isfinite(norm):
            raise NotFiniteError(step, mini_batch, "gradient norm", float(norm))
        torch.nn.utils.clip_grads_with_norm_(parameters, self._config.learner.max_grad_norm, norm)
        self._engine.step()
        return float(norm)

    def _set_learning_rate(self, step: int) -> float:
        rate = learning_rate(self._config.learner, step, self._config.run.total_steps)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _start_engine(self) -> Any:
        learner = self._config.learner
        optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=learner.learning_rate,
            betas=learner.adam_betas,
            weight_decay=learner.weight_decay,
            fused=True,
        )
        engine, *_ = deepspeed.initialize(model=self._model, optimizer=optimizer, config=engine_config(self._config))
        if learner.zero_stage in (1, 2):
            # Outside of fp16 these stages would apply an infinite norm; stage 3 never does.
            engine.optimizer.check_grad_overflow = True
        return engine

    def _frozen_copy(self) -> PolicyModel:
        return load_policy_model(self._folder, self._config).to(self._device).eval().requires_grad_(False)

    @contextmanager
    def _whole_weights(self) -> Iterator[None]:
        """Under ZeRO 3 a rank holds a part of every weight: gather them."""
        sharded = self._config.learner.zero_stage == 3
        with deepspeed.zero.GatheredParameters(list(self._model.parameters()), enabled=sharded):
            yield

    def _sum_stats(self, stats: Stats) -> Stats:
        """Sums added up over the ranks, and the largest of maxima."""
        if self._num_ranks == 1:
            return stats
        summed = {}
        for key in sorted(stats):
            summed[key] = stats[key].to(self._device)
            kind = distributed.ReduceOp.MAX if key.endswith(".max") else distributed.ReduceOp.SUM
            distributed.all_reduce(summed[key], kind)
        return summed

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        if self._num_ranks == 1:
            return value
        summed = value.to(self._device, copy=True)
        distributed.all_reduce(summed)
        return summed.to(value.device)


def _join_ranks() -> None:
    """The process group: of the launcher that set RANK, or of this process alone, which needs no port."""
    if distributed.is_initialized():
        return
    backend = get_accelerator().communication_backend_name()
    if "RANK" in os.environ:
        distributed.init_process_group(backend)
    else:
        # Made for ranks that share a host. To build it takes a compiler and a minute; and a process that is killed
        # while it builds leaves a lock on which every later one would wait for ever.
        deepspeed.ops.__compatible_ops__ = {_SHARED_MEMORY_OP: False}
        os.environ["LOCAL_RANK"] = "0"  # DeepSpeed asks the environment, not the process group
        distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def _fresh_tokens(step: int, batch: StepBatch) -> Tensor:
    """The counted tokens that the version before this step sampled. Bool [B, T]."""
    return drop_old_tokens(batch.version_BT, batch.mask_BT, step - 1, 0)


def _zeros(stats: Stats) -> Stats:
    return {key: torch.zeros_like(value) for key, value in stats.items()}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / max(1, len(values))
