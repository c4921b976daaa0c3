"""A Hugging Face causal language model that gives log-probs of chosen tokens, without logits for all positions.

trainer.py wraps it in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import structlog
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.model.heads import PACKED_LAYERS
from gspo.common.model.teacher_files import naming_teacher
from gspo.common.planning.flops import ModelFlops
from gspo.common.planning.memory import FUSED_ROWS, takes_many_rows
from gspo.learner.model.attention import OWN_ATTENTION, attend_to, attention_name, has_own_attention, use_own_attention
from gspo.learner.model.batch import PackedRollouts
from gspo.learner.model.flop_counts import count_flops
from gspo.learner.model.fused_logprobs import fused_token_logprobs
from gspo.learner.model.named_weights import Whole
from gspo.learner.model.spread_weights import Spreading, each_loaded, whole_where_used
from gspo.learner.ranks.sequence_ranks import SequenceRanks
from gspo_core.kept_logprobs import kept_logprobs
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
EXPERTS = "gspo_grouped"
# Of a module: its rounded weights by name, while there are some.
ROUNDED = "gspo_rounded"
# The end of the names of norms' classes.
_NORM = "Norm"
# In the names of the modules of learner.lora.dropout.
_LORA_DROPOUT = "lora_dropout"
# Whether a module checkpoints activations, by its attribute.
_CHECKPOINTS = "gradient_checkpointing"


class PolicyModel(nn.Module):
    """Log-probs and entropies at a temperature.

    The parameters are float32; under bfloat16 the matrix products are made in bfloat16 (autocast), so that the
    optimizer's weights are the float32 master weights themselves.

    Attributes:
        adapters: The trained part under LoRA; None where the weights themselves are trained.
        ranks: The ranks that share each packed line with this one; None where it has lines of its own.
    """

    ranks: SequenceRanks | None = None

    def __init__(self, causal_lm: PreTrainedModel, config: Config, adapters: Adapters | None = None) -> None:
        super().__init__()
        self.causal_lm, self.adapters = causal_lm, adapters
        self._temperature, self._dtype = config.sampling.temperature, getattr(torch, config.learner.dtype)
        self._is_compiled, self._takes_many_rows = config.learner.torch_compile, takes_many_rows(config.learner)
        self._has_dropout = config.learner.model_dropout
        if not self._has_dropout:
            _end_dropout_of_checkpoints(causal_lm)

    def train(self, mode: bool = True) -> Self:
        """As torch's. The model's own dropout and its routers' noise act only with `learner.model_dropout`.

        Without it all code is in evaluation mode, but for adapters' dropout and what checkpoints activations: that does
        so in training mode alone.
        """
        super().train(mode)
        if mode and not self._has_dropout:
            for name, module in self.causal_lm.named_modules():
                module.training = _LORA_DROPOUT in name or getattr(module, _CHECKPOINTS, False)
        return self

    def forward(
        self,
        input_RS: Tensor,
        line: PackedRollouts | None,
        state_N: Tensor,
        target_N: Tensor,
        temperature_N: Tensor | None = None,
        kept_NK: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(logp_N, entropy_N), float32, of target_N, each predicted by the state at its flat place in [R, S].

        `line` says how rollouts lie in the one row of input_RS; None where each row is one. Ranks that share lines give
        the same input, and get the same result. `temperature_N` is each target's; None is the run's for all. `kept_NK`
        are the tokens that each target was sampled from; None is the vocabulary.
        """
        lower = self._dtype != torch.float32
        # A weight is used once in a forward. The cache would keep a copy of every one of them until its end.
        with torch.autocast(input_RS.device.type, dtype=self._dtype, enabled=lower, cache_enabled=False):
            states_RSD = hidden_states(self.causal_lm, input_RS, line, self.ranks)
        states = states_RSD.flatten(0, 1)
        if self.ranks is None:
            return self._logprobs(states.index_select(0, state_N), target_N, temperature_N, kept_NK)
        # states are those of this rank's part.
        P, length = len(states), input_RS.shape[1]
        own_N = self.ranks.own_places(state_N, length)
        place_M = state_N[own_N] % P
        temperature_M, kept_MK = (None if x_N is None else x_N[own_N] for x_N in (temperature_N, kept_NK))
        own = self._logprobs(states.index_select(0, place_M), target_N[own_N], temperature_M, kept_MK)
        figures_P2 = states.new_zeros(P, 2, dtype=own[0].dtype).index_copy(0, place_M, torch.stack(own, 1))
        logp_N, entropy_N = self.ranks.whole(figures_P2, length).index_select(0, state_N).unbind(1)
        return logp_N, entropy_N

    def checkpoint_activations(self, is_on: bool) -> None:
        """Have the backward pass compute the layers' activations again, from now on, or keep them; the same bits.

        Raises:
            ValueError: The model's code cannot.
        """
        if is_on == self.causal_lm.is_gradient_checkpointing:
            return
        if is_on:
            self.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.causal_lm.gradient_checkpointing_disable()
        self.train(self.training)

    def _logprobs(
        self, hidden_ND: Tensor, target_N: Tensor, temperature_N: Tensor | None, kept_NK: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        temperature = self._temperature
        if temperature_N is not None:  # logits are linear in the states
            hidden_ND, temperature = hidden_ND.float() / temperature_N[:, None], 1.0
        # A CPU has no product of bfloat16 numbers with sums in float32, so rounding would only cost it time.
        hidden_ND = hidden_ND.to(self._dtype) if hidden_ND.is_cuda else hidden_ND.float()
        head_VD = self.causal_lm.get_output_embeddings().weight
        if self._takes_many_rows and hidden_ND.is_cuda:
            rows = FUSED_ROWS if self._is_compiled else 2 * FUSED_ROWS  # of which token_logprobs takes half
        else:
            rows = max(_LEAST_ROWS, _LOGITS_AT_A_TIME // len(head_VD))
        if kept_NK is not None:  # few numbers of each row: there is nothing to fuse
            return kept_logprobs(hidden_ND, head_VD, target_N, kept_NK, temperature=temperature, chunk_size=rows)
        function = fused_token_logprobs if self._is_compiled else token_logprobs
        return function(hidden_ND, head_VD, target_N, temperature=temperature, chunk_size=rows)


def _end_dropout_of_checkpoints(causal_lm: PreTrainedModel) -> None:
    """Modules that can checkpoint activations may be in training mode, so their own rates of dropout become 0."""
    for module in causal_lm.modules():
        if hasattr(module, _CHECKPOINTS):
            rates = [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
            for name in rates:
                setattr(module, name, 0.0)


@dataclass(frozen=True)
class TeacherModel:
    """A run's teacher.

    Attributes:
        model: A frozen PolicyModel, or what calls one.
        is_packed: Whether it takes packed rollouts.
        flops: Operations of its forward pass.
    """

    model: Any
    is_packed: bool
    flops: ModelFlops


def hidden_states(
    causal_lm: PreTrainedModel, input_RS: Tensor, line: PackedRollouts | None, ranks: SequenceRanks | None = None
) -> Tensor:
    """The states [R, S, D] that predict the next tokens; the backward pass attends as this forward does.

    Args:
        ranks: The ranks that share the line; the states are then [1, P, D], those of this rank's part.
    """
    attend_to(line, ranks)
    tokens = {"input_ids": input_RS}
    if line is not None:
        tokens["position_ids"] = line.position_S[None]
    if ranks is not None:
        tokens = {name: ranks.part(token_RS[0])[None] for name, token_RS in tokens.items()}
    states: Tensor = causal_lm.base_model(**tokens, use_cache=False).last_hidden_state
    return states


@contextmanager
def in_evaluation(causal_lm: PreTrainedModel) -> Iterator[None]:
    """A block without dropout; after it, each module is in its mode of before."""
    modes = [(module, module.training) for module in causal_lm.modules()]
    causal_lm.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@torch.no_grad()
def can_be_packed(causal_lm: PreTrainedModel, ranks: SequenceRanks | None = None) -> bool:
    """Whether packed rollouts stay apart in the model: not if it recurs, or has its own attention.

    Args:
        ranks: The ranks that share each line; they try it together.
    """
    if has_own_attention(causal_lm):
        return False
    if not PACKED_LAYERS.issuperset(getattr(causal_lm.config.get_text_config(), "layer_types", None) or ()):
        return False
    vocabulary, device = causal_lm.config.get_text_config().vocab_size, causal_lm.device
    tokens = [torch.arange(1, 1 + length, device=device) * 7 % vocabulary for length in (5, 5, 3)]
    line = PackedRollouts.of([len(token_S) for token_S in tokens], 10).to(device)
    try:
        with in_evaluation(causal_lm):
            apart = [hidden_states(causal_lm, token_S[None], None)[0] for token_S in tokens]
            packed = hidden_states(causal_lm, torch.cat(tokens)[None], line, ranks)[0]
            if ranks is not None:
                packed = ranks.whole(packed, len(line.position_S))
    except _TRIAL_ERRORS:
        return False  # it takes no positions, say
    finally:
        attend_to(None)
    return torch.allclose(torch.cat(apart), packed, rtol=1e-3, atol=1e-3)


def load_policy_model(folder: Path, config: Config, spreading: Spreading | None = None) -> PolicyModel:
    """Load a model folder for training, with adapters where the configuration asks for them.

    Args:
        spreading: Leaves a rank its part of each weight as soon as it is read. With None the rank holds all of them, in
            host memory.

    Raises:
        InputError: The folder does not load, or the model's logits are no matrix product of states and output weight,
            so its log-probs would differ.
    """
    causal_lm = _load_causal_lm(folder, config, spreading)
    _round_states(causal_lm, config, spreading)
    adapters = None
    if config.learner.lora.rank:
        from gspo.learner.model.adapters import Adapters  # here: peft takes a second to import, and few runs need it

        adapters = Adapters(causal_lm, config.learner.lora, seed=config.seed)
    model = PolicyModel(causal_lm, config, adapters)
    model.checkpoint_activations(config.learner.gradient_checkpointing)
    # A model loads in evaluation mode, in which gradient checkpointing and dropout do nothing.
    return model.train()


def load_reference_model(
    policy: PreTrainedModel, folder: Path, config: Config, spreading: Spreading | None = None
) -> PolicyModel:
    """The first policy, frozen, for a KL term; with the attention of the loaded `policy`."""
    return _load_frozen(folder, config, spreading, own_attention=has_own_attention(policy))


def load_teacher_model(
    folder: Path, config: Config, spreading: Spreading | None = None, ranks: SequenceRanks | None = None
) -> TeacherModel:
    """The teacher of the run's configuration.

    It is read twice: the trials compare float32 numbers, and then some of its weights may be rounded.

    Args:
        ranks: The ranks that share each line.

    Raises:
        InputError: As `load_policy_model`, with the keys of `teacher`.
    """
    config = config.with_teacher_as_model()
    with naming_teacher():
        tried = _load_causal_lm(folder, config, spreading)
        own_attention = has_own_attention(tried)
        with whole_where_used(tried, spreading.whole if spreading else nullcontext):
            is_packed = config.learner.packing and can_be_packed(tried, ranks)
        del tried
        teacher = _load_frozen(folder, config, spreading, own_attention=own_attention)
    return TeacherModel(teacher, is_packed, count_flops(teacher.causal_lm))


def _load_frozen(folder: Path, config: Config, spreading: Spreading | None, *, own_attention: bool) -> PolicyModel:
    """A model without gradients, of a folder that has been tried.

    Under bfloat16 its linear layers and experts are stored in bfloat16. Autocast rounds them so at every use, so half
    the memory gives the same bits. The output layer stays in float32, as a CPU multiplies it.
    """
    attention = OWN_ATTENTION if own_attention else attention_name()
    causal_lm = _from_pretrained(folder, config, attention, spreading, getattr(torch, config.learner.dtype))
    _round_states(causal_lm, config, spreading)
    return PolicyModel(causal_lm, config).eval().requires_grad_(False)


def _load_causal_lm(folder: Path, config: Config, spreading: Spreading | None) -> PreTrainedModel:
    try:
        causal_lm = _from_pretrained(folder, config, attention_name(), spreading)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise InputError(
            "model.path",
            f"{folder} does not load as a causal language model ({type(error).__name__}: {error})",
            "Give a folder that `save_pretrained` wrote and that AutoModelForCausalLM loads",
        ) from error
    whole = spreading.whole if spreading else nullcontext
    try:
        with whole_where_used(causal_lm, whole):
            reason = use_own_attention(causal_lm)
        if reason:
            if not has_own_attention(causal_lm):
                causal_lm = _from_pretrained(folder, config, OWN_ATTENTION, spreading)
            log.info("own_attention", model=type(causal_lm).__name__, reason=reason, effect="rollouts are padded")
        with whole_where_used(causal_lm, whole):
            refuse_changed_logits(causal_lm, folder, whole)
            _refuse_lookahead(causal_lm, folder)
    except _TRIAL_ERRORS as error:
        raise InputError(
            "model.path",
            f"{folder} ({type(causal_lm).__name__}) does not turn tokens into hidden states and logits as the learner "
            f"needs them ({type(error).__name__}: {error})",
            _OTHER_ARCHITECTURE,
        ) from error
    return causal_lm


def _from_pretrained(
    folder: Path,
    config: Config,
    attention: str,
    spreading: Spreading | None,
    stored: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """With this attention, or with the model's own where its code knows a few attentions by name alone.

    Args:
        stored: The dtype of the linear layers and experts; every other weight is float32.
    """
    facts = AutoConfig.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code).get_text_config()
    # Ids of the parameters with NaN or infinity -> which of the two.
    not_finite: dict[int, str] = {}

    def keep(module: nn.Module, weight: nn.Parameter) -> None:
        # Code such as XLNet's allocates weights on the CPU under any default device. Their memory is registered before
        # they are read, and a weight that is read may get the same id.
        not_finite.pop(id(weight), None)
        if not weight.isfinite().all():
            not_finite[id(weight)] = "NaN" if weight.isnan().any() else "infinity"
        is_vocabulary = weight.shape[:1] == (facts.vocab_size,)
        if is_product(module, weight, facts.vocab_size):
            weight.data = weight.data.to(stored)
        # Of an embedding and an output layer that may be one, transformers compares the values after the load.
        if spreading and not (is_vocabulary and getattr(facts, "tie_word_embeddings", False)):
            spreading.spread([weight])

    try:
        with each_loaded(keep, one_by_one=spreading is not None):
            causal_lm, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation=attention,
                experts_implementation=EXPERTS,
                trust_remote_code=config.model.trust_remote_code,
                use_safetensors=None if config.model.allow_pickle else True,
                output_loading_info=True,
            )
    except KeyError as error:
        if error.args != (attention,) or attention == OWN_ATTENTION:
            raise
        return _from_pretrained(folder, config, OWN_ATTENTION, spreading, stored)
    if missing := sorted(report["missing_keys"]):
        raise InputError("model.path", f"{folder} lacks {len(missing)} weights, such as {missing[0]}", "Copy it again")
    _refuse_not_finite(causal_lm, folder, not_finite)
    if spreading:
        spreading.spread(list(causal_lm.parameters()))
        causal_lm.to(spreading.device)
    return causal_lm


def _refuse_not_finite(causal_lm: PreTrainedModel, folder: Path, values: dict[int, str]) -> None:
    """Refuse a checkpoint whose parameters hold such values; the tests of the architecture would blame that one."""
    names = {name: values[id(weight)] for name, weight in causal_lm.named_parameters() if id(weight) in values}
    for name, value in names.items():
        more = f", and {len(names) - 1} more tensors have such values" if len(names) > 1 else ""
        rule = f"{folder} has {value} in {name}{more}"
        raise InputError("model.path", rule, "Give a checkpoint of finite weights: its training may have diverged")


@torch.no_grad()
def _round_states(causal_lm: PreTrainedModel, config: Config, spreading: Spreading | None) -> None:
    """Have the states between layers in the dtype of the products: the residual stream, and what norms give on.

    Not outside autocast, since trials compare float32 numbers. A model whose code cannot keeps them in float32.
    """
    if config.learner.dtype == "float32" or not config.learner.bfloat16_states:
        return
    givers = [module for module in causal_lm.modules() if type(module).__name__.endswith(_NORM)]
    hooks = [module.register_forward_hook(_rounded) for module in (causal_lm.get_input_embeddings(), *givers)]
    token_S = torch.arange(8, device=causal_lm.device) * 7 % causal_lm.config.get_text_config().vocab_size
    whole = spreading.whole if spreading else nullcontext
    lower = torch.autocast(causal_lm.device.type, getattr(torch, config.learner.dtype), cache_enabled=False)
    try:
        with whole_where_used(causal_lm, whole), lower:
            hidden_states(causal_lm, token_S[None], None)
    except _TRIAL_ERRORS as error:
        for hook in hooks:
            hook.remove()
        log.info("float32_states", model=type(causal_lm).__name__, reason=f"{type(error).__name__}: {error}")


def _rounded(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    if not isinstance(output, Tensor) or not torch.is_autocast_enabled(output.device.type):
        return output
    return output.to(torch.get_autocast_dtype(output.device.type))


def is_product(module: nn.Module, weight: nn.Parameter, vocabulary: int) -> bool:
    """Whether a weight is that of a linear layer or of stacked experts, and has no row for each token."""
    shape = getattr(weight, "ds_shape", weight.shape)  # of the whole, where a rank has a part
    return (isinstance(module, nn.Linear) or len(shape) == _STACKED) and shape[:1] != (vocabulary,)


@torch.no_grad()
def refuse_changed_logits(causal_lm: PreTrainedModel, folder: Path, whole: Whole) -> None:
    """Refuse a model whose logits are not the product of its hidden states and its output layer.

    Raises:
        InputError: Names the model's class.
    """
    token_S = torch.arange(8, device=causal_lm.device) % causal_lm.config.get_text_config().vocab_size
    head_VD = causal_lm.get_output_embeddings().weight
    hidden_RSD, theirs = hidden_states(causal_lm, token_S[None], None), causal_lm(input_ids=token_S[None]).logits
    with whole([head_VD]):
        ours = hidden_RSD @ head_VD.T
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
        raise InputError(
            "model.path",
            f"{folder} ({type(causal_lm).__name__}) changes its logits after the output layer (a bias, cap or scale)",
            _OTHER_ARCHITECTURE,
        )


@torch.no_grad()
def _refuse_lookahead(causal_lm: PreTrainedModel, folder: Path) -> None:
    """Rows are padded behind their ends, so padding must change no state before it."""
    place_S = torch.arange(8, device=causal_lm.device)
    token_S = place_S * 5 % causal_lm.config.get_text_config().vocab_size
    alone_SD = hidden_states(causal_lm, token_S[None, :5], None)[0]
    padded_SD = hidden_states(causal_lm, torch.stack([token_S, token_S * (place_S < 5)]), None)[1, :5]
    if not torch.allclose(alone_SD, padded_SD, rtol=1e-3, atol=1e-3):
        raise InputError(
            "model.path",
            f"{folder} ({type(causal_lm).__name__}) lets later tokens change the state of an earlier one",
            "Use an architecture that reads from left to right, such as Qwen or Llama",
        )


class _Rounded(torch.autograd.Function):
    """A weight that was rounded before, with the gradient that rounding here would have."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rounded: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return rounded.view_as(rounded)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.to(ctx.dtype), None


def taken(module: nn.Module, name: str) -> Any:
    """An attribute of a module; of a weight its rounded copy, where there is one (rounded_weights.py)."""
    rounded = module.__dict__.get(ROUNDED, {}).get(name)
    value = getattr(module, name)
    return value if rounded is None else _Rounded.apply(value, rounded)  # type: ignore[no-untyped-call]


class _InDtype:
    """A module with its tensors in another dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = taken(self._module, name)
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
ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
