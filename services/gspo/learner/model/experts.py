"""The experts of a mixture under autocast: their products in its dtype, as those of linear layers are.

torch's grouped product has no part in autocast: by itself it would be made in the dtype of the weights, float32, and
in a mixture it is most of the arithmetic. Neighbour: policy_model.py loads models with `experts_name()`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

NAME = "gspo_grouped"


def experts_name() -> str:
    """The way to compute experts to load a model with; a dense model passes it over."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
    return NAME


class _InDtype:
    """A module as it is, its tensors in another dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, Tensor) else value


def _experts(module: nn.Module, hidden_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """Each token's K experts, weighted and added: [N, D]."""
    device = hidden_ND.device.type
    rounded = _InDtype(module, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else module
    experts_ND: Tensor = grouped_mm_experts_forward(rounded, hidden_ND, expert_NK, weight_NK)
    return experts_ND
