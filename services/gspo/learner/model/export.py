"""The policy as a Hugging Face folder for other programs: config, safetensors, tokenizer, chat template."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from gspo.learner.model.adapters import Adapters

_ADAPTER = "adapter"
# Copied from the initial model: tokenizer, chat template, and the code of a model that brings its own.
_COPIED = ("tokenizer*", "*.jinja", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.py")


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
        _write_model(causal_lm, tensors, fresh)
        if adapters is not None:
            adapters.save(fresh / _ADAPTER)
        for file in (file for pattern in _COPIED for file in source.glob(pattern)):
            shutil.copy2(file, fresh / file.name)
        if folder.exists():
            folder.rename(Path(scratch, "replaced"))
        fresh.rename(folder)


def _write_model(causal_lm: PreTrainedModel, tensors: Mapping[str, Tensor], folder: Path) -> None:
    config = copy.deepcopy(causal_lm.config)
    (config.dtype,) = {tensor.dtype for tensor in tensors.values()}
    config.architectures = [type(causal_lm).__name__]
    config.save_pretrained(folder)
    if causal_lm.can_generate():
        causal_lm.generation_config.save_pretrained(folder)
    # The pattern is how transformers names the files of a model.
    save_torch_state_dict(dict(tensors), folder, filename_pattern="model{suffix}.safetensors")
