"""Counts the sizes that a model's costs follow from, by its config.json: `python -m gspo.learner.model.profile FOLDER`.

The model runs on torch's fake tensors, which have shapes and no data. So the counts are those of the code that trains,
for every architecture, in seconds and without weights. It is refused where the learner would refuse it loaded.
"""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutputWithPast

from gspo.common.errors import EXIT_BAD_INPUT, InputError
from gspo.common.model.heads import shares_lines
from gspo.common.planning.model_profile import ModelProfile
from gspo.learner.model.attention import OWN_ATTENTION, attention_name, has_own_attention, keeps_own_attention
from gspo.learner.model.batch import PackedRollouts
from gspo.learner.model.flop_counts import count_flops
from gspo.learner.model.network import EXPERTS, hidden_states, refuse_changed_logits
from gspo.learner.model.rounded_weights import product_weights

# Two sizes give offset and slope. Rows this long use torch's fused attention on every device.
_TOKENS = (2048, 4096)
_ROW = 1024
# Of a model with an attention of its own, which keeps a square of each row.
_OWN_ROW = 256
# Of a model that computes one token after another (a layer of Mamba takes 2 ms each).
_SCANNED_TOKENS = (128, 256)
# The ends of its parameters' names, with their dimensions: Mamba's and RWKV's. Mamba 2 computes a chunk at a time.
_SCANS = {"A_log": 2, "time_decay": 1}
# A mixture's experts lie in one tensor: [experts, out, in].
_STACKED = 3
# The parameter with two matrices of each expert.
_FUSED = "gate_up_proj"


def profile(folder: Path, *, trust_remote_code: bool = False) -> ModelProfile:
    """Count the model of a folder with a config.json.

    Raises:
        InputError: Its logits are not those that the learner computes.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    make = partial(
        AutoModelForCausalLM.from_config,
        config,
        dtype=torch.float32,
        experts_implementation=EXPERTS,
        trust_remote_code=trust_remote_code,
    )
    with FakeTensorMode(allow_non_fake_inputs=True), no_init_weights():
        causal_lm = _with_its_attention(make).eval()
        causal_lm.tie_weights()
        saved = {dtype: _saved_by_tokens(causal_lm, dtype) for dtype in ("bfloat16", "float32")}
    counts = _counts(causal_lm, saved)
    _try_logits(causal_lm, folder)
    return counts


def _with_its_attention(make: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """The model with the learner's attention, or with its own where a run would leave it that."""
    name = attention_name()
    try:
        causal_lm = make(attn_implementation=name)
        with torch.autocast("cpu", torch.bfloat16):  # torch's grouped product refuses float32 on fake tensors
            keeps_own = keeps_own_attention(causal_lm.eval())
    except KeyError as error:
        if error.args != (name,):
            raise
        keeps_own = True
    return make(attn_implementation=OWN_ATTENTION) if keeps_own else causal_lm


def _counts(causal_lm: PreTrainedModel, saved_bytes: dict[str, tuple[float, float, float]]) -> ModelProfile:
    text, head = causal_lm.config.get_text_config(), causal_lm.get_output_embeddings().weight
    if not (layers := _layers(causal_lm)):
        raise ValueError("it has no layers")
    heads = getattr(text, "num_attention_heads", 0)
    head_width = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
    # Multi-head latent attention keeps one latent for all heads.
    latent = getattr(text, "kv_lora_rank", None)
    kv_heads = 1 if latent else getattr(text, "num_key_value_heads", None) or heads
    kv_width = latent + text.qk_rope_head_dim if latent else 2 * kv_heads * head_width
    return ModelProfile(
        model_type=causal_lm.config.model_type,
        num_layers=len(layers),
        num_parameters=_size(causal_lm),
        num_rounded=sum(weight.numel() for weight in product_weights(causal_lm)),
        largest_weight=max(parameter.numel() for parameter in causal_lm.parameters()),
        flops=count_flops(causal_lm),
        vocabulary=head.shape[0],
        width=head.shape[1],
        num_kv=max(1, len(layers) * kv_width),
        num_heads=heads,
        num_kv_heads=max(1, kv_heads),
        num_adapted=sum(_adapted_size(layer) for layer in layers),
        max_positions=getattr(text, "max_position_embeddings", 0) or 0,
        shares_lines=shares_lines(causal_lm.config.model_type, getattr(text, "layer_types", None)),
        saved_bytes=saved_bytes,
    )


def _saved_by_tokens(causal_lm: PreTrainedModel, dtype: str) -> tuple[float, float, float]:
    """Bytes (of a micro-batch, of each of its tokens, of each pair of tokens in a row that is not packed)."""
    multiplied = (module for module in causal_lm.modules() if not isinstance(module, nn.Conv1d))
    if dtype == "float32" and any(w.ndim == _STACKED for module in multiplied for w in module.parameters(False)):
        # torch's grouped product refuses float32 on fake tensors. Twice the bytes of bfloat16 is an upper bound.
        _, a_token, a_pair = _saved_by_tokens(causal_lm, "bfloat16")
        return 0.0, 2 * a_token, 2 * a_pair
    count = partial(_saved_bytes, causal_lm, getattr(torch, dtype))
    if has_own_attention(causal_lm):
        a_row, two_rows, longer = count(_OWN_ROW, 1), count(_OWN_ROW, 2), count(2 * _OWN_ROW, 1)
        fixed = 2 * a_row - two_rows
        a_row -= fixed
        a_pair = (longer - fixed - 2 * a_row) / (2 * _OWN_ROW**2)
        return fixed, a_row / _OWN_ROW - a_pair * _OWN_ROW, a_pair
    weights = ((name.rpartition(".")[2], weight.ndim) for name, weight in causal_lm.named_parameters())
    tokens = _SCANNED_TOKENS if any(_SCANS.get(name) == ndim for name, ndim in weights) else _TOKENS
    rows = [min(_ROW, num_tokens // 2) for num_tokens in tokens]
    few, many = (count(row, num_tokens // row) for row, num_tokens in zip(rows, tokens, strict=True))
    a_token = (many - few) / (tokens[1] - tokens[0])
    return few - a_token * tokens[0], a_token, 0.0


def _saved_bytes(causal_lm: PreTrainedModel, dtype: torch.dtype, row: int, num_rows: int) -> int:
    """Bytes of the storages, other than parameters, that one micro-batch of such rows keeps for its backward pass.

    They are packed, unless the model has an attention of its own.

    Of equal layers one is computed: those of a model that recurs take as many operations as there are tokens.
    """
    weights = {parameter.untyped_storage()._cdata for parameter in causal_lm.parameters()}
    # By their addresses, which no other storage gets while these are referenced: (times, storage).
    saved: dict[int, tuple[int, Any]] = {}
    layers = _EqualLayers(causal_lm)

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved.setdefault(storage._cdata, (layers.times_of(storage), storage))
        return tensor

    input_RS, line = torch.zeros(num_rows, row, dtype=torch.long), None
    if not has_own_attention(causal_lm):
        input_RS, line = input_RS.view(1, -1), PackedRollouts.of([row] * num_rows, row * num_rows)
    with (
        layers,
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32),
    ):
        hidden_states(causal_lm, input_RS, line)
    return sum(number * storage.nbytes() for number, storage in saved.values())


class _EqualLayers:
    """A block in which the first of equal layers computes, and the others return its output."""

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        self._kinds = {layer: _kind(layer) for layer in _layers(causal_lm)}
        self._outputs: dict[str, Any] = {}
        # How many layers the one at work stands for, and the storages that all of them get.
        self._times, self._common = 1, set[int]()

    def times_of(self, storage: Any) -> int:
        """How often a storage exists that the layer at work saves."""
        return 1 if storage._cdata in self._common else self._times

    def __enter__(self) -> None:
        for layer, kind in self._kinds.items():
            layer.forward = partial(self._forward, kind, layer.forward)

    def __exit__(self, *_: object) -> None:
        for layer in self._kinds:
            del layer.forward

    def _forward(self, kind: str, forward: Callable[..., Any], states_RSD: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kind not in self._outputs:
            inputs = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self._common |= {tensor.untyped_storage()._cdata for tensor in inputs}
            self._times = list(self._kinds.values()).count(kind)
            self._outputs[kind] = forward(states_RSD, *args, **kwargs)
            self._times = 1
        return self._outputs[kind]


def _kind(layer: nn.Module) -> str:
    """Modules, shapes and settings of a layer, without its place: layers that have the same save the same."""
    facts: list[Any] = [(name, weight.shape) for name, weight in layer.named_parameters()]
    for module in layer.modules():
        plain = {name: fact for name, fact in vars(module).items() if isinstance(fact, bool | int | float | str)}
        facts.append((type(module).__name__, {**plain, "layer_idx": None}))
    return str(facts)


class _States(BaseModelOutputWithPast):  # type: ignore[misc]
    """Of further outputs, such as a mixture's router logits, there are none."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Body(nn.Module):
    """Stands for a model without its output layer, and returns random states."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.states_RSD = torch.randn(1, 8, width)

    def get_input_embeddings(self) -> nn.Module:
        """transformers names no output layer of a body without them."""
        return self

    def forward(self, *_: Any, **__: Any) -> _States:
        return _States(last_hidden_state=self.states_RSD)


def _try_logits(causal_lm: PreTrainedModel, folder: Path) -> None:
    """The learner's trial of the output layer, with a random one over few tokens; the model is of no use after it.

    Raises:
        InputError: The logits are not the product of states and output layer.
    """
    rows, width = causal_lm.get_output_embeddings().weight.shape
    setattr(causal_lm, causal_lm.base_model_prefix, _Body(width))
    for module in causal_lm.modules():
        for name, weight in module.named_parameters(recurse=False):
            shape = [min(size, 64) if size == rows else size for size in weight.shape]
            setattr(module, name, nn.Parameter(torch.randn(shape)))
    try:
        refuse_changed_logits(causal_lm, folder, nullcontext)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return  # its code takes no such body; the learner tries it as it is


def _layers(causal_lm: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers: of all lists of modules the one with the most parameters."""
    lists = [module for module in causal_lm.base_model.modules() if isinstance(module, nn.ModuleList)]
    largest: nn.ModuleList = max(lists, key=_size)
    return list(largest)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _adapted_size(layer: nn.Module) -> int:
    """Parameters of a layer's adapters for each of their rank.

    A mixture's stacked experts have one each. An adapter over two matrices of each expert
    has twice the rank.
    """
    total = 0
    for name, parameter in layer.named_parameters():
        if parameter.ndim == _STACKED:
            total += (2 if _FUSED in name else 1) * len(parameter) * sum(parameter.shape[1:])
        elif parameter.ndim > 1:
            total += sum(parameter.shape)
    return total


if __name__ == "__main__":
    try:
        print(profile(Path(sys.argv[1]), trust_remote_code="--trust-remote-code" in sys.argv).to_json())  # noqa: T201
    except InputError as error:
        print(json.dumps([error.where, error.rule, error.fix]))  # noqa: T201
        sys.exit(EXIT_BAD_INPUT)
