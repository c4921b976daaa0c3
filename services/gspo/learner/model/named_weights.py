"""A policy's weights under the names of a checkpoint, gathered layer by layer; and as a folder for other programs.

policy_weights.py makes the bits of a push of them.
"""

from __future__ import annotations

import copy
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from gspo.common.host.durable_write import apply_umask
from gspo.learner.push.host_copies import HostCopies
from gspo.learner.shares.owners import owners

if TYPE_CHECKING:
    from gspo.learner.model.adapters import Adapters

_ADAPTER = "adapter"
# Copied from the initial model: tokenizer, chat template, and the code of a model that brings its own.
_COPIED = ("tokenizer*", "*.jinja", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.py")
_LAYER = re.compile(r".*?\.\d+\.")
# A block in which tensors are whole that are otherwise spread over the ranks.
Whole = Callable[[Sequence[Tensor]], AbstractContextManager[object]]


@dataclass(frozen=True)
class NamedWeight:
    """One weight of the policy.

    Attributes:
        parts: The tensors that it is computed from: itself, or a frozen one and its adapter.
        value: Computes it from them, detached, once they are whole.
    """

    parts: Sequence[Tensor]
    value: Callable[[], Tensor]


def checkpoint_tensors(
    causal_lm: PreTrainedModel,
    copies: HostCopies,
    adapters: Adapters | None = None,
    *,
    whole: Whole = nullcontext,
    place: int = 0,
    num_owners: int = 1,
    is_reused: bool = False,
) -> dict[str, Tensor]:
    """The weights that a rank owns under the names of a checkpoint, tied ones once: contiguous copies in host memory.

    Adapters are merged in, in their own dtype and before anything is rounded. A mixture's experts are taken apart on
    the device, a layer at a time, and copied once.

    Args:
        whole: Entered for one layer after another, on every rank in the same order.
        place: This rank's place among those that own layers; -1 takes part in the gathering alone, for an empty result.
        num_owners: Ranks that share the layers; one owns every weight.
        is_reused: Whether the memory of the copies is kept for later ones, when nothing refers to it any more.
    """
    layers = _layers(_policy_weights(causal_lm, adapters))
    sizes = [sum(map(_num_elements, layer.values())) for layer in layers]
    is_own = [owner == place for owner in owners(sizes, num_owners)]
    num_elements = sum(compress(sizes, is_own))
    named: dict[str, Tensor] = {}
    with copies.begin(num_elements, is_reused=is_reused and num_elements > 0) as host_copy:
        for layer, kept in zip(layers, is_own, strict=True):
            with whole([part for weight in layer.values() for part in weight.parts]):
                if kept:
                    values = {name: weight.value() for name, weight in layer.items()}
                    # It takes apart, transposes and renames; a checkpoint has no tensor of two layers.
                    converted: Mapping[str, Tensor] = revert_weight_conversion(causal_lm, values)
                    named |= {name: host_copy.add(tensor) for name, tensor in converted.items()}
            host_copy.end_part()
    return named


def _policy_weights(causal_lm: PreTrainedModel, adapters: Adapters | None) -> dict[str, NamedWeight]:
    """The weights by their names in the loaded model, without those that are tied to others."""
    if adapters is not None:
        weights = adapters.weights()
    else:
        weights = {name: NamedWeight([it], it.detach) for name, it in causal_lm.state_dict(keep_vars=True).items()}
    has_ties = getattr(causal_lm.config.get_text_config(), "tie_word_embeddings", False)
    tied = set(getattr(causal_lm, "all_tied_weights_keys", {})) if has_ties else set()
    return {name: weight for name, weight in weights.items() if name not in tied}


def _layers(weights: Mapping[str, NamedWeight]) -> list[dict[str, NamedWeight]]:
    """The weights of each layer, by the first number in their names; a weight outside the layers is alone."""
    layers: dict[str, dict[str, NamedWeight]] = {}
    for name, weight in weights.items():
        layer = _LAYER.match(name)
        layers.setdefault(layer[0] if layer else name, {})[name] = weight
    return list(layers.values())


def _num_elements(weight: NamedWeight) -> int:
    """The shape of the whole value, also where a rank holds a part of it: an adapter has the shape of its weight."""
    return int(getattr(weight.parts[0], "ds_numel", weight.parts[0].numel()))


def export_model(
    causal_lm: PreTrainedModel,
    tensors: Mapping[str, Tensor],
    source: Path,
    folder: Path,
    adapters: Adapters | None = None,
) -> None:
    """Replace `folder` by the weights `tensors` of `causal_lm`, with the tokenizer files of `source`.

    A folder `adapter` in it has its adapters alone, which peft loads onto the initial model.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        fresh = Path(scratch, "fresh")
        fresh.mkdir()
        config = copy.deepcopy(causal_lm.config)
        (config.dtype,) = {tensor.dtype for tensor in tensors.values()}
        config.architectures = [type(causal_lm).__name__]
        config.save_pretrained(fresh)
        if causal_lm.can_generate():
            causal_lm.generation_config.save_pretrained(fresh)
        # The pattern is how transformers names the files of a model.
        save_torch_state_dict(dict(tensors), fresh, filename_pattern="model{suffix}.safetensors")
        if adapters is not None:
            adapters.save(fresh / _ADAPTER)
        for file in fresh.rglob("*.safetensors"):
            apply_umask(file)
        for file in (file for pattern in _COPIED for file in source.glob(pattern)):
            shutil.copy2(file, fresh / file.name)
        if folder.exists():
            folder.rename(Path(scratch, "replaced"))
        fresh.rename(folder)
