"""Causal language models that the learner trains, and the difference of its log-probs to the model's own.

It makes a tiny random form of every architecture in transformers and loads it from disk, as the learner loads a model.
The log-probs are compared with the model's own attention and full logits. `python -m benchmarks models` writes
docs/models.md.
"""

from __future__ import annotations

import contextlib
import logging
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from gspo.common.errors import InputError
from gspo.common.model.files import causal_models
from gspo.learner.model.attention import has_own_attention
from gspo.learner.model.batch import PackedRollouts
from gspo.learner.model.network import PolicyModel, can_be_packed, load_policy_model
from tests.support.training.rollout_rows import make_config

PAGE = Path("docs/models.md")
VOCABULARY = 96
# Beyond a layer's window of _WINDOW positions, and short enough for every model.
LENGTHS = (24, 20)
_WINDOW = 16
_MOST_PARAMETERS = 30_000_000
# The part of the page from here on is kept as it is.
_FAMILIES = "\n## Families from end to end\n"
_PAGE = (
    """# Models

This page covers the {num} causal language model types of the installed transformers. Each was tried as a tiny random \
model on a CPU in float32. The learner's log-probs were compared with those of the model's own attention (`eager`) and \
full logits. The largest difference of a trained model is {largest}. At each start, the learner repeats this \
comparison with the real model on a few tokens. vLLM has its own list of architectures.

`python -m benchmarks models` writes this page; `make test-long` compares it with new results.

- **carried, packed**: the learner's attention gives the model's log-probs, without padding.
- **carried, padded**: the same, with each rollout in a row of its own.
- **own attention, padded**: the model keeps its own attention, for example because of sinks (`s_aux`) or a score cap. \
Memory and time grow with the square of the longest rollout, which `gspo plan` counts. The learner logs it at \
startup.
- **refused**: the start ends with an error that names the model and the reason.
- **not tried**: no tiny form exists, often because the language model is part of a larger one.

| verdict | number | architectures (`model_type`) |
|---|---:|---|
{rows}
"""
    + _FAMILIES
    + "{families}"
)

# Set if the configuration has them.
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "mamba_d_head"), 16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("state_size", "mamba_d_state", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "first_k_dense_replace", "mamba_n_groups"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "rotary_dim": 4,
    "sliding_window": _WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Set where they are there without a value.
_FILLED = {"head_dim": 8, "num_key_value_heads": 4}
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
_SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 4,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, **_LATENT},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0, 0.0],
        "intermediate_size": [48, 48],
        "laurel_rank": 4,
        "altup_num_inputs": 2,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1},
}


@dataclass(frozen=True)
class ModelVerdict:
    """The verdict on one architecture.

    Attributes:
        kind: Its model_type.
        name: Its class; empty where no tiny form was made.
        verdict: carried, own attention, refused, or not tried; the last two with the reason behind a colon.
        difference: Largest absolute difference of a log-prob, of padded and, where the model takes them, of packed
            rollouts; None where it is not trained.
    """

    kind: str
    name: str
    verdict: str
    difference: float | None = None

    def row(self) -> str:
        """Its row of the table."""
        shown = "" if self.difference is None else f"{self.difference:.0e}"
        return f"| `{self.kind}` | {self.name} | {self.verdict} | {shown} |"


def examine(kind: str, folder: Path) -> ModelVerdict:
    """Make a tiny random model of `kind` in `folder`, and compare the learner's log-probs with its own."""
    try:
        own = tiny_model(kind)
        own.save_pretrained(folder)
    except Exception as error:  # noqa: BLE001
        return ModelVerdict(kind, "", f"not tried: no tiny form was made ({type(error).__name__})")
    name = type(own).__name__
    try:
        policy = load_policy_model(folder, make_config(folder)).eval()
    except InputError as error:
        return ModelVerdict(kind, name, f"refused: {_reason(error)}")
    lm = policy.causal_lm
    difference = float((learner_logp(policy, packed=False) - own_logp(own)).abs().max())
    if is_packed := can_be_packed(lm):
        difference = max(difference, float((learner_logp(policy, packed=True) - own_logp(own)).abs().max()))
    verdict = "own attention" if has_own_attention(lm) else "carried"
    return ModelVerdict(kind, name, verdict + (", packed" if is_packed else ", padded"), difference)


def tiny_model(kind: str) -> PreTrainedModel:
    """A model with random weights around which attention is far from uniform, with its own attention.

    Raises:
        Exception: Neither way to make it small works; the first one's error.
    """
    first: Exception | None = None
    for make in (_constructed, _assigned):
        try:
            return _random_model(make(kind))
        except Exception as error:  # noqa: BLE001 - 178 configurations, each of which fails in its own way
            first = first or error
    raise first or AssertionError(kind)


def _random_model(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if num_parameters > _MOST_PARAMETERS:
        raise MemoryError(f"{num_parameters} parameters")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.3
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    own_logp(model)
    return model


def _constructed(kind: str) -> Any:
    """A small configuration, by the arguments of its class."""
    config = CONFIG_MAPPING[kind]()
    if config.get_text_config() is not config:
        raise NotImplementedError("a part of a larger configuration")
    facts = config.to_dict()
    sizes = {key: value for key, value in _SMALL.items() if facts.get(key) is not None}
    sizes |= {key: value for key, value in _FILLED.items() if key in facts and facts[key] is None}
    if "qk_rope_head_dim" in sizes:
        sizes |= {key: value for key, value in _LATENT.items() if key in sizes}
    kinds = list(dict.fromkeys(facts.get("layer_types") or ()))
    if kinds and "num_hidden_layers" in sizes:
        sizes["num_hidden_layers"] = max(2, len(kinds))
        sizes["layer_types"] = (kinds * 2)[: sizes["num_hidden_layers"]]
    return type(config)(**(sizes | _SPECIAL.get(kind, {})))


def _assigned(kind: str) -> Any:
    """A small configuration, its text part changed afterwards."""
    config = CONFIG_MAPPING[kind]()
    text = config.get_text_config()
    for key, value in (_SMALL | _SPECIAL.get(kind, {})).items():
        with contextlib.suppress(Exception):
            if getattr(text, key, None) is not None:
                setattr(text, key, value)
    if kinds := list(dict.fromkeys(getattr(text, "layer_types", None) or ())):
        text.num_hidden_layers = max(2, len(kinds))
        text.layer_types = (kinds * 2)[: text.num_hidden_layers]
    return config


def _tokens() -> list[torch.Tensor]:
    # No id is one of the special ones.
    return [torch.arange(length) * (5 + 2 * row) % (VOCABULARY - 3) + 3 for row, length in enumerate(LENGTHS)]


@torch.no_grad()
def own_logp(model: PreTrainedModel) -> torch.Tensor:
    """Log-probs of every token but the first of each row, one row at a time, from the model's full logits."""
    rows = []
    for token_S in _tokens():
        logits = model(input_ids=token_S[None], use_cache=False).logits[0, :-1].float()
        rows.append(logits.log_softmax(-1).gather(1, token_S[1:, None])[:, 0])
    return torch.cat(rows)


@torch.no_grad()
def learner_logp(policy: PolicyModel, *, packed: bool) -> torch.Tensor:
    """The same by the learner's model, of rows side by side with padding, or one after another."""
    tokens = _tokens()
    lengths = [len(token_S) - 1 for token_S in tokens]
    inputs, targets = [token_S[:-1] for token_S in tokens], torch.cat([token_S[1:] for token_S in tokens])
    padded = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True)
    places = torch.cat([torch.arange(length) + row * padded.shape[1] for row, length in enumerate(lengths)])
    line = PackedRollouts.of(lengths, sum(lengths)) if packed else None
    if line:
        padded, places = torch.cat(inputs)[None], torch.arange(sum(lengths))
    logp: torch.Tensor = policy(padded, line, places, targets)[0]
    return logp


def _reason(error: InputError) -> str:
    """The reason without the folder and the details of the tiny form."""
    if "changes its logits" in error.rule:
        return "changes its logits after the output layer"
    if "lets later tokens change" in error.rule:
        return "reads later tokens"
    cause = re.search(r"\((\w+Error): ", error.rule)
    return f"does not load or run in the learner ({cause[1] if cause else 'see the message'})"


def page(findings: Sequence[ModelVerdict]) -> str:
    """docs/models.md."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for finding in sorted(findings, key=lambda finding: finding.verdict):
        kinds[finding.verdict].append(f"`{finding.kind}`")
    return _PAGE.format(
        num=len(findings),
        largest=f"{max(finding.difference or 0.0 for finding in findings):.0e}",
        rows="\n".join(f"| {verdict} | {len(names)} | {', '.join(names)} |" for verdict, names in kinds.items()),
        families=PAGE.read_text().partition(_FAMILIES)[2],
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' and the learner's own lines."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def examine_all(kinds: Sequence[str] = ()) -> list[ModelVerdict]:
    """The verdict of every model type that the learner takes, or of these."""
    torch.set_num_threads(1)
    verdicts = []
    for kind in kinds or sorted(causal_models()):
        with tempfile.TemporaryDirectory() as folder, quiet():
            verdicts.append(examine(kind, Path(folder)))
        print(verdicts[-1].row(), flush=True)
    return verdicts
