"""The policy as a Hugging Face folder that any other program loads: config, safetensors, tokenizer, chat template.

Not a checkpoint: it has no optimizer. Neighbours: policy_model.py names the weights, trainer.py calls it.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import save_torch_state_dict
from transformers import PreTrainedModel

from services.learner.policy_model import checkpoint_tensors

if TYPE_CHECKING:
    from services.learner.adapters import Adapters

_ADAPTER = "adapter"
# Everything beside the weights is the given model's own: tokenizer, chat template, and code that it may come with.
_COPIED = ("tokenizer*", "*.jinja", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.py")


def export_model(
    causal_lm: PreTrainedModel, source: Path, folder: Path, dtype: torch.dtype, adapters: Adapters | None = None
) -> None:
    """Write `causal_lm` in `dtype`, with the tokenizer files of `source`, and put it in the place of `folder`.

    Its adapters are merged into what is written. In a folder in it they stand alone, for peft to load on the model
    that training started from.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        fresh = Path(scratch, "fresh")
        fresh.mkdir()
        _write_model(causal_lm, fresh, dtype, adapters)
        if adapters is not None:
            adapters.save(fresh / _ADAPTER)
        for file in (file for pattern in _COPIED for file in source.glob(pattern)):
            shutil.copy2(file, fresh / file.name)
        if folder.exists():
            folder.rename(Path(scratch, "replaced"))
        fresh.rename(folder)


def _write_model(causal_lm: PreTrainedModel, folder: Path, dtype: torch.dtype, adapters: Adapters | None) -> None:
    config = copy.deepcopy(causal_lm.config)
    config.dtype = dtype
    config.architectures = [type(causal_lm).__name__]
    config.save_pretrained(folder)
    if causal_lm.can_generate():
        causal_lm.generation_config.save_pretrained(folder)
    # The pattern is how transformers names the files of a model.
    save_torch_state_dict(
        checkpoint_tensors(causal_lm, dtype, adapters), folder, filename_pattern="model{suffix}.safetensors"
    )
