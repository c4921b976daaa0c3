"""A model of 100 M parameters and the versions that a few RL steps make of it. Only child processes import it.

The weights start at random and learn the words of Python's own library for a while. Then each learning rate continues
from there with a fresh AdamW in float32 and policy gradients. A gradient is that of the log-prob of each text times an
advantage drawn from a standard normal, like rewards that a policy cannot predict. The files are bfloat16, as served.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from gspo.learner.push.policy_weights import PolicyWeights, weights_from
from tests.support.tiny_model import make_tokenizer

_VOCABULARY = 32_768
_TEXTS, _TEXT_TOKENS = 8, 128
_MINI_BATCHES = 4
_LEARN_STEPS, _LEARN_RATE = 24, 3e-4
_MAX_GRAD_NORM = 1.0


def train_versions(folder: str, rates: Sequence[float], versions: int) -> None:
    """Write FOLDER/model and FOLDER/RATE-VERSION.safetensors for every learning rate and version. A child process."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(_shape())
    batches = _batches(_words())
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARN_RATE)
    for _ in range(_LEARN_STEPS):
        _step(model, optimizer, next(batches), torch.ones(_TEXTS))
    _save_model(model, Path(folder) / "model")
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for rate in rates:
        model.load_state_dict(start, strict=False)  # the tied output weight is the embedding
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        for version in range(1, versions + 1):
            for _ in range(_MINI_BATCHES):
                _step(model, optimizer, next(batches), torch.randn(_TEXTS))
            save_file(_policy(model), Path(folder) / f"{rate:g}-{version}.safetensors")


def load_version(folder: Path, rate: float, version: int, *, number: int | None = None) -> PolicyWeights:
    """A version of a learning rate, as the learner publishes it under `number`; version 0 is the model itself."""
    file = folder / f"{rate:g}-{version}.safetensors" if version else folder / "model/model.safetensors"
    return weights_from(version if number is None else number, load_file(file))


def _shape() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def _words() -> Tensor:
    """Words and signs of the standard library's sources as ids, the frequent ones low; rare ones share the last id."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    words = [word for file in files for word in re.findall(r"\w+|\S|\s+", file.read_text(errors="replace"))]
    ids = {word: place for place, (word, _) in enumerate(Counter(words).most_common(_VOCABULARY - 1))}
    return torch.tensor([ids.get(word, _VOCABULARY - 1) for word in words])


def _batches(words: Tensor) -> Iterator[Tensor]:
    """Token ids [texts, tokens], from random places, for ever."""
    chance = torch.Generator().manual_seed(1)
    while True:
        places = torch.randint(len(words) - _TEXT_TOKENS, (_TEXTS,), generator=chance)
        yield torch.stack([words[place : place + _TEXT_TOKENS] for place in places.tolist()])


def _step(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, token_BT: Tensor, advantage_B: Tensor) -> None:
    """One optimizer step that raises each text's mean log-prob by its advantage."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits_BTV = model(input_ids=token_BT[:, :-1]).logits
    logp_BT = -torch.nn.functional.cross_entropy(
        logits_BTV.float().flatten(0, 1), token_BT[:, 1:].flatten(), reduction="none"
    ).view(len(token_BT), -1)
    loss = -(advantage_B * logp_BT.mean(1)).mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
    optimizer.step()


def _policy(model: Qwen3ForCausalLM) -> dict[str, Tensor]:
    return {name: weight.detach().to(torch.bfloat16) for name, weight in model.named_parameters()}


def _save_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    folder.mkdir(parents=True)
    make_tokenizer().save_pretrained(folder)
    model.config.dtype, model.config.architectures = torch.bfloat16, [type(model).__name__]
    model.config.save_pretrained(folder)
    save_file(_policy(model), folder / "model.safetensors", metadata={"format": "pt"})
