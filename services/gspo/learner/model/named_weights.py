"""A policy's weights under the names of a checkpoint, gathered one after another; and as a folder for other programs.

policy_weights.py makes the bits of a push of them.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

if TYPE_CHECKING:
    from gspo.learner.model.adapters import Adapters

_ADAPTER = "adapter"
# Copied from the initial model: tokenizer, chat template, and the code of a model that brings its own.
_COPIED = ("tokenizer*", "*.jinja", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.py")
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
    dtype: torch.dtype,
    adapters: Adapters | None = None,
    *,
    whole: Whole = nullcontext,
    kept: bool = True,
) -> dict[str, Tensor]:
    """Every weight under the name that a checkpoint gives it, tied ones once, as contiguous CPU copies in `dtype`.

    Adapters are merged in, in their own dtype and before anything is rounded.

    Args:
        whole: Entered for one weight after another, on every rank in the same order.
        kept: False on a rank that only takes part in the gathering; it gets an empty result.
    """
    has_ties = causal_lm.config.get_text_config().tie_word_embeddings
    tied = set(getattr(causal_lm, "all_tied_weights_keys", {})) if has_ties else set()
    if adapters is not None:
        weights = adapters.weights()
    else:
        weights = {name: NamedWeight([it], it.detach) for name, it in causal_lm.state_dict(keep_vars=True).items()}
    copies = {}
    for name, weight in weights.items():
        if name in tied:
            continue
        with whole(weight.parts):
            if kept:
                copies[name] = weight.value().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
    if not kept:
        return {}
    # It splits, transposes and renames: no number changes, so it may come after the rounding.
    named: Mapping[str, Tensor] = revert_weight_conversion(causal_lm, copies)
    return {name: _unshared(tensor) for name, tensor in named.items()}


def _unshared(tensor: Tensor) -> Tensor:
    """In memory of its own: a file of tensors cannot be written otherwise."""
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


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
        for file in (file for pattern in _COPIED for file in source.glob(pattern)):
            shutil.copy2(file, fresh / file.name)
        if folder.exists():
            folder.rename(Path(scratch, "replaced"))
        fresh.rename(folder)
