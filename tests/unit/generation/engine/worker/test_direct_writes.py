"""Updates of layers whose tensors a model's loader copies in itself, with vLLM's own reload."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from gspo.generation.engine.weights import _refuse_untouched_layers
from gspo.generation.engine.worker.direct_writes import DirectWrites


class Sinks(nn.Module):
    """As the attention of gpt-oss, whose sinks are a parameter of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.proj = nn.Linear(3, 2, bias=False)


class Mixed(nn.Module):
    """One tensor by a weight loader, and stacked ones copied in piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.experts = nn.Parameter(torch.zeros(3, 2, 2), requires_grad=False)


class DirectlyLoadedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.experts = Sinks(), Mixed()
        record_metadata_for_reloading(self)

    def load_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in tensors.items():
            parameter = parameters[name]
            if name.endswith("sinks"):
                parameter.data.copy_(tensor)
            elif name.endswith("experts.experts"):
                for number in (0, 0, 1, 2):  # once too often: it counts once
                    parameter.data[number].copy_(tensor[number].T)
            else:
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)


def policy(start: float) -> dict[str, torch.Tensor]:
    return {
        "experts.experts": torch.arange(12.0).reshape(3, 2, 2) + start,
        "attention.sinks": torch.arange(4.0) + start,
        "attention.proj.weight": torch.arange(6.0).reshape(2, 3) + start,
        "experts.scale": torch.arange(2.0) + start,
    }


CONFIG: Any = SimpleNamespace(dtype=torch.float32)


def test_an_update_has_all_tensors_however_they_are_loaded() -> None:
    model = DirectlyLoadedModel()
    serving = dict(model.named_parameters())
    for start in (1.0, 100.0):
        initialize_layerwise_reload(model)
        with DirectWrites(model):
            model.load_weights(policy(start))
            _refuse_untouched_layers(model)
        finalize_layerwise_reload(model, CONFIG)
        expected = policy(start)
        assert torch.equal(model.attention.sinks, expected["attention.sinks"])
        assert torch.equal(model.attention.proj.weight, expected["attention.proj.weight"])
        assert torch.equal(model.experts.scale, expected["experts.scale"])
        assert torch.equal(model.experts.experts, expected["experts.experts"].transpose(1, 2))
        # Compiled graphs hold the memory.
        assert {name: it.data_ptr() for name, it in model.named_parameters()} == {
            name: it.data_ptr() for name, it in serving.items()
        }


def test_a_layer_without_its_tensors_is_refused() -> None:
    model, tensors = DirectlyLoadedModel(), policy(1.0)
    del tensors["attention.sinks"]
    initialize_layerwise_reload(model)
    with DirectWrites(model):
        model.load_weights(tensors)
        with pytest.raises(RuntimeError, match="the push has no tensor for layer attention"):
            _refuse_untouched_layers(model)


def test_what_no_update_can_repeat_is_refused() -> None:
    model = DirectlyLoadedModel()
    initialize_layerwise_reload(model)
    with DirectWrites(model), pytest.raises(RuntimeError, match=r"sinks is loaded by aten\.fill_\.Scalar"):
        model.attention.sinks.data.fill_(1.0)
