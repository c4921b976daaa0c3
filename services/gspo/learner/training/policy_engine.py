"""The policy under DeepSpeed on one rank: its start, optimizer steps, gathered weights and checkpoints.

The one file that imports DeepSpeed; trainer.py chooses the rows and makes the losses.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, distributed

from gspo.common.config.engines import SPREAD_STAGE
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.bfloat16_products import use_float32_products
from gspo.common.host.durable_write import replace_file
from gspo.common.host.machine import generators_per_gpu, visible_gpus
from gspo.common.host.process_tuning import return_freed_memory
from gspo.common.model.teacher_files import teacher_folder
from gspo.learner.model.batch import MicroBatch
from gspo.learner.model.compiled_layers import compile_layers
from gspo.learner.model.named_weights import checkpoint_tensors, export_model
from gspo.learner.model.network import (
    PolicyModel,
    TeacherModel,
    can_be_packed,
    load_policy_model,
    load_reference_model,
    load_teacher_model,
)
from gspo.learner.model.rounded_weights import rounded_once, rounded_weights, store_rounded, take_rounded
from gspo.learner.model.routing_replay import Routers
from gspo.learner.model.spread_weights import Spreading, whole_where_used
from gspo.learner.push.host_copies import HostCopies, lock_no_more_than_needed
from gspo.learner.ranks.launcher import cores_per_rank, num_local_ranks
from gspo.learner.ranks.process_group import join, set_deadlines, sum_over_ranks
from gspo.learner.ranks.sequence_ranks import SequenceRanks
from gspo.learner.shares.rank_share import RankShare
from gspo.learner.shares.share_server import ShareServer
from gspo.learner.storage.checkpoint_parts import RankPart, wait_for_parts
from gspo.learner.storage.training_states import StatesFile, WeightRange, WrittenStates, copy_shares
from gspo.learner.training.deepspeed_config import engine_config
from gspo.learner.training.gpu_memory import own_fraction
from gspo.learner.training.host_states import HostStates
from gspo.learner.training.rank_gpus import gather_gpus
from gspo.learner.training.trainer_api import Hyperparameters, MakeVersion, WriteCheckpoint

# DeepSpeed's configuration of a frozen model, where its weights are spread.
_FROZEN = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
_STATE = "caller.json"
_SHARED_MEMORY_OP = "deepspeed_shm_comm"
# In the names of the modules that turn positions into angles.
_ROTARY = "Rotary"
# The end of a bias's name, also of those that all experts of a layer have in one tensor; our own key of a group.
_BIAS, _DECAYS = "bias", "decays"


class PolicyEngine:
    """One rank of the policy. Every rank makes the same calls in the same order.

    Attributes:
        deepspeed: The model as DeepSpeed wraps it.
        sequence_ranks: The ranks that share each line with this one; None where each rank has lines of its own.
        packing: Whether it reads packed lines.
        routers: Those of a mixture whose experts are replayed; else None.
        teacher: The teacher that this process loads; else None.
        gpus: Each rank's GPU -> its peak flop/s, or None where that is unknown.

    Args:
        server: Serves this rank's share of each version; None on rank zero, and where nothing is pushed.
    """

    def __init__(self, config: Config, model_folder: Path, server: ShareServer | None = None) -> None:
        self._config, self._folder = config, model_folder
        self.threads = config.learner.threads or cores_per_rank(num_local_ranks())
        torch.set_num_threads(self.threads)
        lock_no_more_than_needed()
        self.device = _join(config)
        if self.device.type == "cpu" and config.learner.dtype == "bfloat16":
            use_float32_products()
        self.rank, self.num_ranks = distributed.get_rank(), distributed.get_world_size()
        with return_freed_memory():
            spreading = self._spreading(engine_config(config)) if self._is_spread else None
            self.model = load_policy_model(model_folder, config, spreading).to(self.device)
            shared = config.learner.sequence_ranks
            self.sequence_ranks = SequenceRanks(shared, config.learner.rank_timeout_s) if shared > 1 else None
            self.model.ranks = self.sequence_ranks
            with whole_where_used(self.model.causal_lm, self._whole):
                self.packing = config.learner.packing and can_be_packed(self.model.causal_lm, self.sequence_ranks)
                replays = config.algorithm.routing_replay == "learner"
                self.routers = Routers(self.model.causal_lm) if replays else None
            self._refuse_padded_lines(self.model, is_packed=self.packing)
            if self.model.adapters is not None and not self._is_spread:
                store_rounded(self.model.causal_lm, getattr(torch, config.learner.dtype))
            if not self._is_spread:
                take_rounded(self.model.causal_lm)
            rounded = self._rounded_weights()
            self.deepspeed = self._start_engine()
            self._gather_rounded(rounded)
            self._reference_model = self._start_reference()
            self.teacher = self._start_teacher()
        frozen = [self._reference_model, self.teacher and self.teacher.model]
        self._states = HostStates([self.deepspeed, *frozen], self.device)
        self._copies = HostCopies(self.device, getattr(torch, config.generation.dtype))
        self._share = RankShare(self.device, config.learner.rank_timeout_s, server)
        self.gpus = gather_gpus(
            self.device, getattr(torch, config.learner.dtype), self.threads, int(os.environ["LOCAL_RANK"])
        )
        set_deadlines(config.learner.rank_timeout_s)
        if config.learner.torch_compile:
            for frozen_or_trained in (self.model, *(it for it in frozen if it is not None)):
                compile_layers(frozen_or_trained.causal_lm)
        # Last: the trials at the start compare two ways to attend, and TF32 would blur them.
        _allow_tf32(config, self.device, [self.model, *frozen])

    def policy(self) -> dict[str, Tensor]:
        """The weights in the generators' dtype, by checkpoint names, tied ones once: contiguous copies in host memory.

        Empty on every rank but rank zero. The ranks gather one layer at a time, so that no rank's device ever holds
        the whole policy.
        """
        return self._tensors(0 if self.rank == 0 else -1, num_owners=1)

    def begin_version(self, version: int, recorded: str, *, is_reused: bool) -> MakeVersion:
        """Copy the layers that this rank owns, in the generators' dtype; otherwise as `policy`.

        Args:
            recorded: The digest on record for this version; empty without one.
            is_reused: Whether the memory is kept for a later call, once nothing refers to it any more.

        Returns:
            Makes the version from the shares of all ranks, in any thread and beside training. Each rank calls it.
        """
        self._share.forget_older()
        tensors = self._tensors(self._share.place, self._share.num_owners, is_reused=is_reused)
        return partial(self._share.make, version, tensors, recorded)

    def write_share(self, version: int, folder: Path) -> None:
        """Write this rank's tensors of one of the last two versions; rank zero has its own where it needs them."""
        self._share.write(version, folder)
        distributed.barrier()

    def _tensors(self, place: int, num_owners: int, *, is_reused: bool = False) -> dict[str, Tensor]:
        return checkpoint_tensors(
            self.model.causal_lm,
            self._copies,
            self.model.adapters,
            whole=self._whole,
            place=place,
            num_owners=num_owners,
            is_reused=is_reused,
        )

    def save(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write model and optimizer to `folder`, every rank its part, and the caller's `state`, which is JSON.

        Learning rate and random numbers are functions of the step number, and need no state.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for file in self._copied_files():
            file.write(folder)
        self._write_caller(folder, state)
        distributed.barrier()

    def begin_save(self, folder: Path, state: Mapping[str, Any]) -> WriteCheckpoint:
        """Copy this rank's part of a checkpoint to host memory; otherwise as `save`.

        Returns:
            Writes the part, in any thread and beside training; after an error it may be called again. On rank zero it
            also waits for the parts of the others.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._write_caller(folder, state)
        part, timeout_s = RankPart(self.rank, self._copied_files()), self._config.learner.rank_timeout_s

        def write(is_given_up: Callable[[], bool]) -> None:
            part.write(folder)
            if self.rank == 0:
                wait_for_parts(folder, self.num_ranks, timeout_s, is_given_up)

        return write

    def _copied_files(self) -> Iterator[StatesFile]:
        # Under LoRA the frozen weights are in the model folder. Without ZeRO all ranks have the same.
        writes = self.rank == 0 or self._config.learner.zero_stage > 0
        return copy_shares(self.rank, self._shares() if writes else (), self._optimizer_state)

    def _write_caller(self, folder: Path, state: Mapping[str, Any]) -> None:
        if self.rank == 0:
            replace_file(folder / _STATE, json.dumps(dict(state)).encode())

    def load(self, folder: Path) -> dict[str, Any]:
        """Continue from a checkpoint of `save`, of any number of ranks; returns the caller's state.

        Raises:
            FileNotFoundError: The folder holds no whole checkpoint.
            InputError: Another version of the learner wrote it.
            ValueError: The files lack a part of the states.
        """
        state: dict[str, Any] = json.loads((folder / _STATE).read_text())
        written = WrittenStates(folder)
        written.restore(list(self._shares()), self._optimizer_state)
        if self._config.learner.zero_stage:
            self._copy_back(written)
        return state

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder with its tokenizer, in the generators' dtype; replaces `folder`.

        Adapters are merged in, and also stand alone in a folder in it.
        """
        tensors, adapters = self.policy(), self.model.adapters
        with self._whole([] if adapters is None else [p for p in self.model.parameters() if p.requires_grad]):
            if self.rank == 0:
                export_model(self.model.causal_lm, tensors, self._folder, folder, adapters)
        distributed.barrier()

    def move_to_host(self) -> None:
        """Free this rank's device: weights, gradients, optimizer states and frozen models go to host memory."""
        self._states.move_to_host()

    def move_to_device(self) -> None:
        """Bring the states back, to the bit."""
        self._states.move_to_device()

    def _start_engine(self) -> Any:
        learner = self._config.learner
        optimizer = torch.optim.AdamW(
            self._parameter_groups(),
            lr=learner.learning_rate,
            betas=learner.adam_betas,
            eps=learner.adam_eps,
            weight_decay=learner.weight_decay,
            fused=True,
        )
        engine = deepspeed.initialize(model=self.model, optimizer=optimizer, config=engine_config(self._config))[0]
        if learner.zero_stage and learner.offload == "none":
            update_in_place(engine)
        return engine

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """AdamW's groups of the trained parameters: one, or a second one without weight decay."""
        groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
        for name, weight in self._trained():
            shape = getattr(weight, "ds_shape", weight.shape)  # a rank's part under ZeRO 3 is flat
            is_matrix = len(shape) > 1 and not name.endswith(_BIAS)
            groups[is_matrix or not self._config.learner.decay_matrices_only].append(weight)
        return [{"params": weights, _DECAYS: decays} for decays, weights in groups.items() if weights]

    def _rounded_weights(self) -> list[torch.nn.Parameter]:
        """The weights that passes may gather rounded; the same ones on every rank."""
        dtype = getattr(torch, self._config.learner.dtype)
        if not self._is_spread or dtype == torch.float32:
            return []
        weights = rounded_weights(self.model.causal_lm, dtype, self._whole)
        num_agreed = sum_over_ranks(torch.tensor(bool(weights)).int(), self.device)
        return weights if int(num_agreed) == self.num_ranks else []

    def _gather_rounded(self, weights: Sequence[Any]) -> None:
        """Let forward and backward passes gather these weights in the dtype of the products, in half the bytes.

        The attribute is that of DeepSpeed's own autocast, which would reduce gradients in bfloat16 too. Only passes
        read it. A weight that DeepSpeed leaves whole between them keeps its float32 values.
        """
        for weight in weights:
            if not weight.ds_persist:
                setattr(weight, PARAM_COMM_DTYPE_ATTR_NAME, getattr(torch, self._config.learner.dtype))

    def _refuse_padded_lines(self, model: PolicyModel, *, is_packed: bool) -> None:
        if self.sequence_ranks and not is_packed:
            raise InputError(
                "learner.sequence_ranks",
                f"{self._config.learner.sequence_ranks} ranks cannot share a line of packed rollouts: "
                f"{type(model.causal_lm).__name__} would mix them, or attends in a way of its own",
                "Set it to 1, or take another model",
            )

    def _spreading(self, config: Mapping[str, Any]) -> Spreading:
        """The way to spread weights before there is an engine of this configuration, which has ZeRO 3."""
        first = torch.nn.Linear(1, 1, bias=False, device=self.device)
        deepspeed.zero.Init(module=first, config_dict_or_path=config, dtype=torch.float32)
        # A converted parameter converts others as it was converted itself.
        convert = first.weight.convert_to_zero_parameters  # type: ignore[attr-defined]
        return Spreading(lambda parameters: convert(param_list=list(parameters)), self._whole, self.device)

    def _start_reference(self) -> Any:
        """The first policy as a frozen copy, spread over the ranks under ZeRO 3; None if there is no such copy."""
        if not self._config.algorithm.needs_reference or self.model.adapters is not None:
            return None
        spreading = self._spreading(_FROZEN) if self._is_spread else None
        return self._started(load_reference_model(self.model.causal_lm, self._folder, self._config, spreading))

    def _start_teacher(self) -> TeacherModel | None:
        if self._config.teacher.path is None:
            return None
        spreading = self._spreading(_FROZEN) if self._is_spread else None
        folder = teacher_folder(self._config)
        teacher = load_teacher_model(folder, self._config, spreading, self.sequence_ranks)
        self._refuse_padded_lines(teacher.model, is_packed=teacher.is_packed)
        return replace(teacher, model=self._started(teacher.model))

    def _started(self, frozen: PolicyModel) -> Any:
        frozen.ranks = self.sequence_ranks
        return deepspeed.initialize(model=frozen, config=_FROZEN)[0] if self._is_spread else frozen.to(self.device)

    @property
    def _optimizer_state(self) -> Any:
        """torch's AdamW's: tensor -> moments and step."""
        optimizer = self.deepspeed.optimizer
        return (optimizer.optimizer if self._config.learner.zero_stage else optimizer).state

    def _trained(self) -> Iterator[tuple[str, Any]]:
        return ((name, it) for name, it in self.model.named_parameters() if it.requires_grad)

    def _shares(self) -> Iterator[WeightRange]:
        """The parts of the parameters that this rank updates, wherever DeepSpeed keeps them."""
        stage, optimizer = self._config.learner.zero_stage, self.deepspeed.optimizer
        for name, parameter in self._trained():
            if not stage:
                yield WeightRange(name, 0, parameter.detach().view(-1), parameter, 0)
            elif self._is_spread:
                group, offset, num = optimizer.grad_position[optimizer.get_param_id(parameter)]
                owner, start = optimizer.fp32_partitioned_groups_flat[group], num * self.rank
                # The last parts are filled up to equal lengths.
                if (num := min(num, parameter.ds_numel - start)) > 0:
                    yield WeightRange(name, start, owner.detach().narrow(0, offset, num), owner, offset)
            elif (part := parameter._hp_mapping) is not None:
                owner = optimizer.single_partition_of_fp32_groups[part.param_group_index]
                start, offset = part.lp_fragment_address.start, part.hp_fragment_address.start
                yield WeightRange(name, start, part.hp_fragment.detach(), owner, offset)

    @torch.no_grad()
    def _copy_back(self, written: WrittenStates) -> None:
        """Give the weights that the model computes with the restored values; ZeRO may update copies of its own."""
        for name, parameter in self._trained():
            if self._is_spread:
                start = parameter.ds_tensor.numel() * self.rank
                if (num := min(parameter.ds_tensor.numel(), parameter.ds_numel - start)) > 0:
                    parameter.ds_tensor.view(-1)[:num].copy_(written.read(name, start, num))
            if parameter.numel():  # whole on every rank: under ZeRO 3 a small one
                parameter.data.view(-1).copy_(written.read(name, 0, parameter.numel()))
        if self._is_spread:
            self.deepspeed.optimizer.invalidate_secondary_tensor()

    @contextmanager
    def reference(self) -> Iterator[Any]:
        """A block with the first policy: the frozen copy, or the policy without its adapters."""
        if self.model.adapters is None:
            yield self._reference_model
        else:
            with self.model.adapters.off():
                yield self.deepspeed

    @contextmanager
    def policy_at_rest(self) -> Iterator[Any]:
        """A block with the policy, in which its weights stay: passes take copies in bfloat16 that are made once.

        Under gradient checkpointing each layer makes its own copies, so that few exist at a time.
        """
        lower = getattr(torch, self._config.learner.dtype)
        if lower == torch.float32 or self._is_spread or self.model.causal_lm.is_gradient_checkpointing:
            yield self.deepspeed
            return
        with rounded_once(self.model.causal_lm, lower):
            yield self.deepspeed

    def forward(self, micro: MicroBatch, *, is_last: bool) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [R, T] of a micro-batch, with a gradient if it has a backward pass.

        Args:
            is_last: Whether an update follows its passes.
        """
        self.deepspeed.set_gradient_accumulation_boundary(is_last)
        with torch.set_grad_enabled(micro.backward):
            logp_N, entropy_N = self.deepspeed(*micro.model_input)
            return micro.spread(logp_N), micro.spread(entropy_N)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this rank's part of the loss.

        DeepSpeed averages gradients over the ranks; N and M count all ranks, so the sum is needed. A loss that is not
        finite may have finite gradients: it makes them NaN, on every rank, in every ZeRO stage.
        """
        self.deepspeed.backward(loss * (self.num_ranks * torch.where(loss.detach().isfinite(), 1.0, math.nan)))

    def set_hyperparameters(self, hyperparameters: Hyperparameters) -> None:
        """Make the next updates with these; a loaded checkpoint brought those of its own step."""
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = hyperparameters.learning_rate
            group["weight_decay"] = hyperparameters.weight_decay if group[_DECAYS] else 0.0
        if self._config.learner.zero_stage:
            self.deepspeed.optimizer.clip_grad = hyperparameters.max_grad_norm
        self.model.checkpoint_activations(hyperparameters.gradient_checkpointing)

    def apply(self, max_grad_norm: float) -> float:
        """Clip and update; returns the gradient norm before the clip. A norm that is not finite updates nothing."""
        if self._config.learner.zero_stage:
            self.deepspeed.step()
            return math.nan if self.deepspeed.optimizer.overflow else float(self.deepspeed.get_global_grad_norm())
        parameters = [p for p in self.deepspeed.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not math.isfinite(norm):
            self.deepspeed.optimizer.zero_grad()
            return float(norm)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        self.deepspeed.step()
        return float(norm)

    @property
    def _is_spread(self) -> bool:
        """Under ZeRO 3 a rank holds a part of every weight."""
        return self._config.learner.zero_stage == SPREAD_STAGE

    @contextmanager
    def _whole(self, parts: Sequence[Any]) -> Iterator[None]:
        """Gather tensors that are spread over the ranks, as they are stored."""
        for part in parts:
            # A pass may leave it whole for the next one, but rounded.
            if hasattr(part, PARAM_COMM_DTYPE_ATTR_NAME) and part.ds_status == ZeroParamStatus.AVAILABLE:
                part.partition()
        with deepspeed.zero.GatheredParameters(list(parts), enabled=self._is_spread):
            yield

    def kept(self) -> list[Tensor]:
        """A version in host memory: of the trained weights this rank's parts, or whole ones on the first rank alone."""
        return [tensor.to("cpu", copy=True) for tensor in self._own_tensors()]

    @contextmanager
    def exchanged(self, kept: Sequence[Tensor]) -> Iterator[None]:
        """A block in which all ranks compute with a kept version; after it with the present one again, to the bit.

        Within the block `kept` has the present version, so that the host has no third copy.
        """
        self._change(_swap, kept)
        try:
            yield
        finally:
            self._change(Tensor.copy_, kept)

    def _own_tensors(self) -> list[Tensor]:
        if self._is_spread:
            return [weight.ds_tensor for _, weight in self._trained()]
        return [weight.data for _, weight in self._trained()] if self.rank == 0 else []

    @torch.no_grad()
    def _change(self, move: Callable[[Tensor, Tensor], object], kept: Sequence[Tensor]) -> None:
        """Change the weights of this rank, and let all ranks compute with the changed ones."""
        weights = [weight for _, weight in self._trained()]
        for weight in weights if self._is_spread else ():
            if weight.ds_status == ZeroParamStatus.AVAILABLE:
                weight.partition()
        for tensor, other in zip(self._own_tensors(), kept, strict=True):
            move(tensor, other)
        if not self._is_spread:
            for weight in weights if self.num_ranks > 1 else ():
                distributed.broadcast(weight.data, 0)
            return
        self.deepspeed.optimizer.invalidate_secondary_tensor()
        for weight in weights:
            if weight.ds_persist:
                weight.all_gather()


def _swap(here: Tensor, kept: Tensor) -> None:
    present = here.to("cpu", copy=True)
    here.copy_(kept)
    kept.copy_(present)


def update_in_place(engine: Any) -> None:
    """Let ZeRO update the weights that passes read, not a float32 copy of them: 4 bytes a parameter less.

    DeepSpeed copies them since passes may read bfloat16. Here both are float32.

    Args:
        engine: DeepSpeed's, with ZeRO and without offload.
    """
    zero = engine.optimizer
    if engine.zero_optimization_partition_weights():
        pairs = zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True)
    else:
        own = [parts[distributed.get_rank()] for parts in zero.parallel_partitioned_bit16_groups]
        pairs = zip(zero.single_partition_of_fp32_groups, own, strict=True)
    for updated, read in pairs:
        updated.data = read.data
    zero._link_all_hp_params()  # they refer to the copies


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
    # On shared GPUs rank zero comes only when the generators sleep.
    late_s = config.run.start_timeout_s if config.placement == "shared" else 0.0
    device = torch.device(accelerator.current_device_name())
    join(accelerator.communication_backend_name(), config.learner.rank_timeout_s + late_s, device)
    return device


def _allow_tf32(config: Config, device: torch.device, models: Sequence[torch.nn.Module | None]) -> None:
    """Let products that stay float32 under bfloat16, such as merges of adapters, round their inputs to TF32 on a GPU.

    Not those of positions and frequencies: TF32 has every whole number up to 2,048 only, and some models multiply them
    as matrices (https://github.com/huggingface/transformers/issues/48428).
    `learner.dtype: float32` promises float32 on GPUs too.
    """
    if device.type != "cuda" or config.learner.dtype != "bfloat16":
        return
    torch.set_float32_matmul_precision("high")
    for module in (module for model in models if model is not None for module in model.modules()):
        if _ROTARY in type(module).__name__:
            module.register_forward_pre_hook(lambda *_: torch.set_float32_matmul_precision("highest"))
            module.register_forward_hook(lambda *_: torch.set_float32_matmul_precision("high"), always_call=True)


def _limit_gpu_memory(config: Config, local_rank: int) -> None:
    """Leave the generators their share of this rank's GPU: torch keeps the memory that it has freed."""
    gpus = visible_gpus()
    if local_rank >= len(gpus):
        return  # nvidia-smi does not answer
    fraction = own_fraction(config, gpus[local_rank], generators_per_gpu(gpus)[local_rank])
    if fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction, local_rank)
