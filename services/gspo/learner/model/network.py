"""A Hugging Face causal language model that gives log-probs of chosen tokens, without logits for all positions.

trainer.py wraps it in DeepSpeed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.learner.model.attention import OWN_ATTENTION, attend_to, attention_name, has_own_attention, use_own_attention
from gspo.learner.model.batch import PackedRollouts
from gspo_core.logprobs import token_logprobs

if TYPE_CHECKING:
    from gspo.learner.model.adapters import Adapters

log = structlog.get_logger()
# 128 MiB of logits in float32: with a small vocabulary more rows at a time, so that fixed costs are paid less often.
_LOGITS_AT_A_TIME = 2**25
_LEAST_ROWS = 1024
_OTHER_ARCHITECTURE = (
    "Use an architecture whose logits are hidden states times the output weight, such as Qwen or Llama"
)
# Errors of the code of an architecture that differs from the others.
_TRIAL_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
# A mixture's experts lie in one tensor: [experts, out, in].
_STACKED = 3
_EXPERTS = "gspo_grouped"


class PolicyModel(nn.Module):
    """Log-probs and entropies at a temperature.

    The parameters are float32; under bfloat16 the matrix products are made in bfloat16 (autocast), so that the
    optimizer's weights are the float32 master weights themselves.

    Attributes:
        adapters: The trained part under LoRA; None where the weights themselves are trained.
    """

    def __init__(self, causal_lm: PreTrainedModel, config: Config, adapters: Adapters | None = None) -> None:
        super().__init__()
        self.causal_lm, self.adapters = causal_lm, adapters
        self._temperature, self._dtype = config.sampling.temperature, getattr(torch, config.learner.dtype)

    def forward(
        self, input_RS: Tensor, line: PackedRollouts | None, state_N: Tensor, target_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(logp_N, entropy_N), float32, of target_N, each predicted by the state at its flat place in [R, S].

        `line` says how rollouts lie in the one row of input_RS; None where each row is one.
        """
        lower = self._dtype != torch.float32
        with torch.autocast(input_RS.device.type, dtype=self._dtype, enabled=lower):
            hidden_RSD = hidden_states(self.causal_lm, input_RS, line)
        hidden_ND = hidden_RSD.flatten(0, 1).index_select(0, state_N)
        head_VD = self.causal_lm.get_output_embeddings().weight
        rows = max(_LEAST_ROWS, _LOGITS_AT_A_TIME // len(head_VD))
        return token_logprobs(hidden_ND, head_VD, target_N, temperature=self._temperature, chunk_size=rows)


def hidden_states(causal_lm: PreTrainedModel, input_RS: Tensor, line: PackedRollouts | None) -> Tensor:
    """The states [R, S, D] that predict the next tokens; the backward pass attends as this forward does."""
    attend_to(line)
    positions = {} if line is None else {"position_ids": line.position_S[None]}
    states: Tensor = causal_lm.base_model(input_ids=input_RS, use_cache=False, **positions).last_hidden_state
    return states


@torch.no_grad()
def can_be_packed(causal_lm: PreTrainedModel) -> bool:
    """Whether packed rollouts stay apart in the model: not if it recurs, or has its own attention."""
    if has_own_attention(causal_lm):
        return False
    kinds = set(getattr(causal_lm.config.get_text_config(), "layer_types", None) or ())
    if not kinds <= {"full_attention", "sliding_attention"}:
        return False
    vocabulary, device = causal_lm.config.get_text_config().vocab_size, causal_lm.device
    tokens = [torch.arange(1, 1 + length, device=device) * 7 % vocabulary for length in (5, 5, 3)]
    line = PackedRollouts.of([len(token_S) for token_S in tokens], 10).to(device)
    training = causal_lm.training
    causal_lm.eval()
    try:
        apart = [hidden_states(causal_lm, token_S[None], None)[0] for token_S in tokens]
        packed = hidden_states(causal_lm, torch.cat(tokens)[None], line)[0]
    except _TRIAL_ERRORS:
        return False  # it takes no positions, say
    finally:
        causal_lm.train(training)
        attend_to(None)
    return torch.allclose(torch.cat(apart), packed, rtol=1e-3, atol=1e-3)


def load_policy_model(folder: Path, config: Config) -> PolicyModel:
    """Load a model folder for training, with adapters where the configuration asks for them.

    Raises:
        InputError: The folder does not load, or the model's logits are no matrix product of states and output weight,
            so its log-probs would differ.
    """
    causal_lm = _load_causal_lm(folder, config)
    adapters = None
    if config.learner.lora.rank:
        from gspo.learner.model.adapters import Adapters  # here: peft takes a second to import, and few runs need it

        adapters = Adapters(causal_lm, config.learner.lora, seed=config.seed)
    if config.learner.gradient_checkpointing:
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    # A model loads in evaluation mode, in which gradient checkpointing and dropout do nothing.
    return PolicyModel(causal_lm, config, adapters).train()


def load_reference_model(folder: Path, config: Config) -> PolicyModel:
    """The first policy, frozen, for a KL term.

    Under bfloat16 its linear layers and experts are stored in bfloat16. Autocast rounds them so at every use, so half
    the memory gives the same bits. The output layer stays in float32, as its product does.
    """
    reference = PolicyModel(_load_causal_lm(folder, config), config)
    for module in reference.causal_lm.base_model.modules():
        for weight in module.parameters(recurse=False):
            if isinstance(module, nn.Linear) or weight.ndim == _STACKED:
                weight.data = weight.data.to(getattr(torch, config.learner.dtype))
    return reference.eval().requires_grad_(False)


def _load_causal_lm(folder: Path, config: Config) -> PreTrainedModel:
    try:
        causal_lm = _from_pretrained(folder, config, attention_name())
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise InputError(
            "model.path",
            f"{folder} does not load as a causal language model ({type(error).__name__}: {error})",
            "Give a folder that `save_pretrained` wrote and that AutoModelForCausalLM loads",
        ) from error
    try:
        if reason := use_own_attention(causal_lm):
            if not has_own_attention(causal_lm):
                causal_lm = _from_pretrained(folder, config, OWN_ATTENTION)
            log.info("own_attention", model=type(causal_lm).__name__, reason=reason, effect="rollouts are padded")
        _refuse_changed_logits(causal_lm, folder)
        _refuse_lookahead(causal_lm, folder)
    except _TRIAL_ERRORS as error:
        raise InputError(
            "model.path",
            f"{folder} ({type(causal_lm).__name__}) does not turn tokens into hidden states and logits as the learner "
            f"needs them ({type(error).__name__}: {error})",
            _OTHER_ARCHITECTURE,
        ) from error
    return causal_lm


def _from_pretrained(folder: Path, config: Config, attention: str) -> PreTrainedModel:
    """With this attention, or with the model's own where its code knows a few attentions by name alone."""
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=attention,
            experts_implementation=_EXPERTS,
            trust_remote_code=config.model.trust_remote_code,
            use_safetensors=None if config.model.allow_pickle else True,
        )
    except KeyError as error:
        if error.args != (attention,) or attention == OWN_ATTENTION:
            raise
    return _from_pretrained(folder, config, OWN_ATTENTION)


@torch.no_grad()
def _refuse_changed_logits(causal_lm: PreTrainedModel, folder: Path) -> None:
    token_RS = torch.arange(8).view(1, 8) % causal_lm.config.get_text_config().vocab_size
    hidden_RSD = hidden_states(causal_lm, token_RS, None)
    ours, theirs = hidden_RSD @ causal_lm.get_output_embeddings().weight.T, causal_lm(input_ids=token_RS).logits
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
        raise InputError(
            "model.path",
            f"{folder} ({type(causal_lm).__name__}) changes its logits after the output layer (a bias, cap or scale)",
            _OTHER_ARCHITECTURE,
        )


@torch.no_grad()
def _refuse_lookahead(causal_lm: PreTrainedModel, folder: Path) -> None:
    """Rows are padded behind their ends, so padding must change no state before it."""
    token_S = torch.arange(8) * 5 % causal_lm.config.get_text_config().vocab_size
    alone_SD = hidden_states(causal_lm, token_S[None, :5], None)[0]
    padded_SD = hidden_states(causal_lm, torch.stack([token_S, token_S * (torch.arange(8) < 5)]), None)[1, :5]
    if not torch.allclose(alone_SD, padded_SD, rtol=1e-3, atol=1e-3):
        raise InputError(
            "model.path",
            f"{folder} ({type(causal_lm).__name__}) lets later tokens change the state of an earlier one",
            "Use an architecture that reads from left to right, such as Qwen or Llama",
        )


class _InDtype:
    """A module with its tensors in another dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, Tensor) else value


def _experts(module: nn.Module, hidden_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """Each token's K experts, weighted and added: [N, D].

    torch's grouped product ignores autocast and would run in float32, the dtype of the weights. In a mixture it is
    most of the arithmetic, so the weights are rounded to autocast's dtype first, as those of linear layers are.
    """
    device = hidden_ND.device.type
    rounded = _InDtype(module, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else module
    experts_ND: Tensor = grouped_mm_experts_forward(rounded, hidden_ND, expert_NK, weight_NK)
    return experts_ND


# A dense model ignores it.
ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, _experts)
