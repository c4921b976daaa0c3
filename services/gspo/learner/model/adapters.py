"""LoRA through peft: the adapters of a policy, the weights with the adapters merged in, the adapters alone.

Only adapters are trained; generators and exports see ordinary weights. Merging writes to copies.
"""

import warnings
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import PreTrainedModel

from gspo.common.config.engines import LoraConfig as LoraSection
from gspo.common.errors import InputError
from gspo.common.model.files import ALL_LINEAR
from gspo.learner.model.named_weights import NamedWeight

_NAME = "default"  # peft's name of an adapter without a name
_OF_ADAPTERS, _WRAPPED = ".lora_", "base_layer"


class Adapters:
    """The adapters of one policy. Their initial values depend on the seed alone; their product starts at zero.

    Args:
        causal_lm: Its chosen layers are wrapped in place, and all its own weights are frozen. The names are those of a
            checkpoint: peft knows that a loaded mixture has its experts in fewer, larger parameters.

    Raises:
        InputError: A name fits no layer that can have adapters.
    """

    def __init__(self, causal_lm: PreTrainedModel, lora: LoraSection, *, seed: int) -> None:
        chosen = list(lora.target_modules)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            torch.manual_seed(seed)
            # The message is about the rank of fused experts, which does take effect.
            warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
            try:
                self._peft: PeftModel = get_peft_model(
                    causal_lm,
                    LoraConfig(
                        r=lora.rank,
                        lora_alpha=lora.alpha,
                        lora_dropout=lora.dropout,
                        target_modules=ALL_LINEAR if chosen == [ALL_LINEAR] else chosen,
                        task_type="CAUSAL_LM",
                    ),
                )
            except ValueError as error:
                raise InputError(
                    "learner.lora.target_modules", f"{chosen}: {error}", "Name linear layers, such as q_proj"
                ) from error
        if not lora.dropout:  # a dropout of float32 states draws other numbers
            # peft copies states in bfloat16 to float32, the dtype of the adapters, and autocast rounds them back.
            for layer in self._layers():
                layer.cast_input_dtype_enabled = False

    def off(self) -> AbstractContextManager[None]:
        """A block with the policy without its adapters: the base."""
        base: AbstractContextManager[None] = self._peft.disable_adapter()
        return base

    def weights(self) -> dict[str, NamedWeight]:
        """The policy's weights under the names that they have without adapters, the products added in copies."""
        adapted = {
            _plain(f"{name}.{getattr(layer, 'parameter_name', 'weight')}"): layer
            for layer, name in self._layers().items()
        }
        return {
            plain: _merged(weight, adapted.get(plain))
            for name, weight in self._peft.get_base_model().state_dict(keep_vars=True).items()
            if _OF_ADAPTERS not in name
            for plain in [_plain(name)]
        }

    def _layers(self) -> dict[LoraLayer, str]:
        """The layers with adapters, and their names."""
        modules = self._peft.get_base_model().named_modules()
        return {layer: name for name, layer in modules if isinstance(layer, LoraLayer)}

    def save(self, folder: Path) -> None:
        """Write the adapters in peft's own form: adapter_config.json and adapter_model.safetensors."""
        self._peft.save_pretrained(str(folder), save_embedding_layers=False)


def _merged(weight: Tensor, layer: LoraLayer | None) -> NamedWeight:
    if layer is None:
        return NamedWeight([weight], weight.detach)
    parts = [weight, layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight]
    return NamedWeight(parts, lambda: weight.detach() + layer.get_delta_weight(_NAME).detach())


def _plain(name: str) -> str:
    """A name without peft's wrapping layers: one around a linear layer, one around each weight of experts."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED)
