"""Finds the weights of a model that may be rounded to the dtype of its products, in half the bytes.

training/policy_engine.py gathers and stores them so.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import structlog
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gspo.learner.model.named_weights import Whole
from gspo.learner.model.network import ROUNDED, hidden_states, in_evaluation, is_product, taken
from gspo.learner.model.spread_weights import whole_where_used

log = structlog.get_logger()
# bfloat16 would round it.
_IN_PLACE_OF_ZEROS = 0.1


def product_weights(causal_lm: PreTrainedModel) -> set[nn.Parameter]:
    """The weights of linear layers and experts."""
    vocabulary = causal_lm.config.get_text_config().vocab_size
    owned = ((module, weight) for module in causal_lm.modules() for weight in module.parameters(recurse=False))
    return {weight for module, weight in owned if is_product(module, weight, vocabulary)}


@torch.no_grad()
def rounded_weights(causal_lm: PreTrainedModel, dtype: torch.dtype, whole: Whole) -> list[nn.Parameter]:
    """The weights that autocast rounds at every use: linear layers and experts.

    Empty if a trial gives other states where they come rounded: from a layer that leaves autocast, or from experts with
    adapters, which peft adds in float32.

    Args:
        dtype: That of the products.
        whole: Gathers weights that are spread over the ranks.
    """
    rounded = product_weights(causal_lm)
    as_stored, as_gathered = (_trial_states(causal_lm, dtype, whole, some) for some in ((), rounded))
    if torch.equal(as_stored, as_gathered):
        return list(rounded)
    log.info("float32_gathers", model=type(causal_lm).__name__, reason="rounded weights give another state")
    return []


class RoundingLinear(nn.Linear):
    """A linear layer that takes the copy of its weight that `rounded_once` made, where there is one."""

    def forward(self, states: Tensor) -> Tensor:
        """The product, as nn.Linear's."""
        return nn.functional.linear(states, taken(self, "weight"), taken(self, "bias"))


def take_rounded(causal_lm: PreTrainedModel) -> None:
    """Make linear layers RoundingLinear.

    They share the class's function: with one for each module, torch would compile each layer of the model anew.
    """
    for module in _rounding_modules(causal_lm):
        if type(module) is nn.Linear:
            module.__class__ = RoundingLinear


@contextmanager
def rounded_once(causal_lm: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """A block whose passes take the trained weights of products as they were rounded at its begin: the same bits.

    Autocast would round each of them in every pass, and keep the copies until its end.
    """
    modules = _rounding_modules(causal_lm)
    with torch.no_grad():
        for module in modules:
            weights = {name: weight for name, weight in module.named_parameters(recurse=False) if weight.requires_grad}
            module.__dict__[ROUNDED] = {name: weight.to(dtype) for name, weight in weights.items()}
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__[ROUNDED]


def _rounding_modules(causal_lm: PreTrainedModel) -> list[nn.Module]:
    weights = product_weights(causal_lm)
    return [module for module in causal_lm.modules() if weights.intersection(module.parameters(recurse=False))]


@torch.no_grad()
def store_rounded(causal_lm: PreTrainedModel, dtype: torch.dtype) -> None:
    """Store the frozen weights of linear layers in the dtype of the products, where it has them exactly.

    Every pass and every merge of adapters then has the same bits. Experts stay: peft adds adapters in their dtype.
    """
    linear = (module.weight for module in causal_lm.modules() if isinstance(module, nn.Linear))
    for weight in product_weights(causal_lm).intersection(linear):
        if not weight.requires_grad and torch.equal(rounded := weight.to(dtype), weight):
            weight.data = rounded


def _trial_states(causal_lm: PreTrainedModel, dtype: torch.dtype, whole: Whole, rounded: Collection[Tensor]) -> Tensor:
    """The states [1, S, D] of some tokens, with some weights rounded."""

    @contextmanager
    def prepared(weights: Sequence[Tensor]) -> Iterator[None]:
        with whole(weights):
            stored = [(weight, weight.data) for weight in weights]
            for weight, data in stored:
                # Adapters add nothing before they are trained.
                used = data if data.any() else torch.full_like(data, _IN_PLACE_OF_ZEROS)
                weight.data = used.to(dtype).to(data.dtype) if weight in rounded else used
            try:
                yield
            finally:
                for weight, data in stored:
                    weight.data = data

    device = causal_lm.device
    token_S = torch.arange(8, device=device) * 7 % causal_lm.config.get_text_config().vocab_size
    lower = torch.autocast(device.type, dtype, cache_enabled=False)
    with in_evaluation(causal_lm), whole_where_used(causal_lm, prepared), lower:
        return hidden_states(causal_lm, token_S[None], None)
