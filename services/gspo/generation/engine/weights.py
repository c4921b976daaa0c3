"""The part of a weight update that runs inside vLLM's processes: load the policy, or changes, from shared memory.

The receiver has checked the digest of its bytes before vLLM is paused.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from gspo.common.host.bfloat16_products import use_float32_products
from gspo.generation.engine.tied_heads import EMBEDDING
from gspo.generation.engine.worker.direct_writes import DirectWrites
from gspo.generation.engine.worker.expected_warnings import filter_expected_warnings
from gspo.generation.engine.worker.in_place import ChangesInPlace
from gspo.generation.engine.worker.policy_tensors import DeviceTensors, host_tensors

BACKEND = "gspo"
# The refusal of a policy that is not the whole of the model, in the text that comes out of vLLM's process.
MISSING = "weights: the push has no tensor"


@dataclass
class NoInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on beforehand: every load names its file."""


@dataclass
class SharedPolicy(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A whole policy, or the changes to the one that serves: a file to map, and each tensor in it.

    Attributes:
        tensors: Name, dtype, shape and byte `offset` of each; of changes as `ChangesInPlace.load` takes them.
        absent: The tensors that the model folder has beside those of a whole policy.
        form: `whole`; `changes`; or `trial`, changes that a whole load follows.
    """

    path: str
    tensors: list[dict[str, Any]]
    absent: list[dict[str, Any]] = field(default_factory=list)
    form: Literal["whole", "changes", "trial"] = "whole"


class SharedMemoryEngine(WeightTransferEngine[NoInitInfo, SharedPolicy]):  # type: ignore[misc]
    """Loads checkpoint-format weights from shared memory into a model that is serving.

    vLLM repacks weights after loading. The layerwise reload puts every layer back into checkpoint form, and repacks it
    after its last tensor. Changes can be loaded in place only where nothing is repacked.
    """

    init_info_cls = NoInitInfo
    update_info_cls = SharedPolicy

    def __init__(self, *arguments: Any) -> None:
        """vLLM calls it when the model is there, before the first request."""
        super().__init__(*arguments)
        self._changes = ChangesInPlace(self.model)
        self._is_whole = False
        self._read = host_tensors
        if not current_platform.is_cpu():
            self._read = DeviceTensors(self.device).read
            return
        # vLLM's attention in bfloat16 uses AMX if the CPU has it. Linux gives that to a process at its request alone,
        # which vLLM does not make: the first token would end the process by an illegal instruction.
        torch.cpu._init_amx()
        if self.model_config.dtype == torch.bfloat16:
            use_float32_products()
        if self.vllm_config.speculative_config is not None:
            from gspo.generation.engine.worker.draft_kernels import repair_kernels  # here: it loads vLLM's sampler

            repair_kernels()

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing to open."""

    def start_weight_update(self) -> None:
        """Nothing: a whole load and changes begin in different ways."""

    def receive_weights(self, update_info: SharedPolicy) -> None:
        """Load all tensors. On any error the model is left ready for a whole new load, not serving."""
        self._is_whole = update_info.form == "whole"
        if self._is_whole:
            self._load_policy(update_info)
        else:
            tensors = (it | {"name": name} for it in update_info.tensors for name in _names(it["name"], self._is_tied))
            self._changes.load(update_info.path, tensors, self.device, is_trial=update_info.form == "trial")

    def finish_weight_update(self) -> None:
        """After a whole load, repack the remaining layers, and bring all back to serving form."""
        if self._is_whole:
            finalize_layerwise_reload(self.model, self.model_config)
            self._changes.compare()

    def shutdown(self) -> None:
        """Nothing to close."""

    def _load_policy(self, update_info: SharedPolicy) -> None:
        """Put every layer into the state in which it takes checkpoint tensors, and give it those of the policy."""
        if current_platform.is_cpu():
            _forget_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)
        try:
            tensors = self._read(update_info.path, update_info.tensors)
            with DirectWrites(self.model):
                self.model.load_weights((it, tensor) for name, tensor in tensors for it in _names(name, self._is_tied))
                _refuse_untouched_layers(self.model)
                _refuse_missing_tensors(self.model, update_info)
        except BaseException:
            self._changes.forget_trial()
            self._abandon()
            raise

    @property
    def _is_tied(self) -> bool:
        """Whether the policy has no output layer of its own.

        If a tied model's files hold one, vLLM takes the tie out of the configuration, and ties again after the load.
        Its values are equal: the check before the start refuses others.
        """
        config = self.model_config
        named = getattr(config.hf_text_config, "tie_word_embeddings", False)
        return bool(named or config.word_embeddings_untied_by_checkpoint)

    def _abandon(self) -> None:
        """Forget the tensors of a failed load: kept, they would count as loaded in the next one."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)


def _names(name: str, is_tied: bool) -> tuple[str, ...]:
    """Under which a tensor is loaded: the embedding of a tied policy is the output head too, which it leaves out.

    vLLM keeps a repacked copy of its own for the head; without a tensor it would stay at the old weights.
    """
    return (name, "lm_head.weight") if is_tied and EMBEDDING.search(name) else (name,)


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    """Have the kernels of a mixture's experts built again with the next weights.

    On a CPU vLLM brings experts into the kernel's layout only when it builds the kernel. It would misread the elements
    of later weights.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def _refuse_untouched_layers(model: torch.nn.Module) -> None:
    """Refuse a layer that got no tensor: vLLM only warns, and would serve old weights beside new ones.

    Raises:
        RuntimeError: Names the layer.
    """
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        has_weights = next(layer.parameters(recurse=False), None) is not None
        if has_weights and info.can_load() and info.load_numel == 0:
            raise RuntimeError(f"{MISSING} for layer {name}")


def _refuse_missing_tensors(model: torch.nn.Module, policy: SharedPolicy) -> None:
    """Refuse an absent tensor that the model would load: its old values would serve beside new ones.

    Only the architecture knows which tensors of a folder it ignores, so it is offered each of them.

    Raises:
        RuntimeError: Names the tensor.
    """
    layers = [get_layerwise_info(layer) for layer in model.modules()]
    load_weights: Any = model.load_weights
    before = [info.load_numel for info in layers]
    for name, tensor in host_tensors(policy.path, policy.absent):
        load_weights([(name, tensor)])
        if [info.load_numel for info in layers] != before:
            raise RuntimeError(f"{MISSING} {name!r}, which this model loads")


def register() -> None:
    """Register the backend in this vLLM process, and filter its log; vLLM calls it once or more in each process."""
    filter_expected_warnings()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryEngine)
