"""The model flops of a step, and the matrices of a loaded model that they follow from (common/planning/flops.py)."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from gspo.common.planning.flops import UNLIMITED, ModelFlops
from gspo.learner.model.batch import StepBatch

# A mixture's experts lie in one tensor: [experts, out, in].
_STACKED = 3
_SLIDING, _FULL = "sliding_attention", "full_attention"


def count_flops(causal_lm: PreTrainedModel) -> ModelFlops:
    """Count a model with or without adapters, on any device, also where ZeRO 3 has spread its parameters."""
    text = causal_lm.config.get_text_config()
    body = trained_body = 0.0
    for parameter, share in _matrices(causal_lm.base_model, getattr(text, "num_experts_per_tok", None)):
        elements = share * _shape(parameter).numel()
        body += elements
        trained_body += elements if parameter.requires_grad else 0.0
    weight = causal_lm.get_output_embeddings().weight
    head = _shape(weight).numel()
    return ModelFlops(
        body=body,
        head=head,
        attention=_attention(text),
        trained_body=trained_body,
        trained_head=head if weight.requires_grad else 0,
    )


def _matrices(model: nn.Module, experts_per_token: int | None) -> Iterator[tuple[nn.Parameter, float]]:
    """Every matrix, and the share of it that one token multiplies."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if isinstance(module, nn.Embedding):
            continue
        # An adapter of stacked experts has those of all experts side by side in one matrix.
        adapted = getattr(modules[name.partition(".lora_")[0]], "num_experts", 1) if ".lora_" in name else 1
        for parameter in module.parameters(recurse=False):
            shape = _shape(parameter)
            is_stacked = len(shape) == _STACKED and not isinstance(module, nn.Conv1d)
            num_experts = shape[0] if is_stacked else adapted
            if len(shape) > 1:
                chosen = min(experts_per_token or num_experts, num_experts)
                yield parameter, chosen / num_experts


def _shape(parameter: Tensor) -> Any:
    """Elements of the whole parameter: under ZeRO 3 a rank may hold a part."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _attention(text: Any) -> Mapping[int, float]:
    """ModelFlops.attention, by the configuration; layers that recur have none."""
    if not (heads := getattr(text, "num_attention_heads", 0)):
        return {}
    head_width = getattr(text, "head_dim", None) or text.hidden_size // heads
    key = value = head_width
    if getattr(text, "kv_lora_rank", None):  # multi-head latent attention
        key, value = text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
    window = getattr(text, "sliding_window", None) or UNLIMITED
    types = getattr(text, "layer_types", None)
    if types is None:
        is_sliding = window and getattr(text, "use_sliding_window", True)
        types = [_SLIDING if is_sliding else _FULL] * text.num_hidden_layers
    widths: dict[int, float] = defaultdict(float)
    for layer_type in types:
        if layer_type in (_SLIDING, _FULL):
            widths[window if layer_type == _SLIDING else UNLIMITED] += heads * (key + value) / 2
    return dict(widths)


def step_flops(
    model: ModelFlops, scorings: Sequence[ModelFlops], batch: StepBatch, moving_B: Tensor, mini_batches: Iterable[int]
) -> dict[str, float]:
    """`train_flops` and `generation_flops` over all ranks, which no cut into micro-batches and ranks changes.

    Rollouts that a rank repeats only to keep step with the others, and the mismatch probe, count for nothing.

    Args:
        model: The policy's.
        scorings: Those of the models that read the whole batch forward beside it, one for each column.
        moving_B: The rollouts with a gradient; the others are read forward alone.
        mini_batches: That of each update, which costs the same, applied or not.
    """
    sizes = [[(branch.length, branch.num_counted) for branch in branches] for branches in batch.branches]
    forward = [sum(model.forward(*size) for size in of_rollout) for of_rollout in sizes]
    moved = [
        sum(model.backward(*size) for size in of_rollout) if moving else 0.0
        for of_rollout, moving in zip(sizes, moving_B.tolist(), strict=True)
    ]
    of_mini_batch: dict[int, float] = defaultdict(float)
    for mini_batch, there, back in zip(batch.mini_batch_B.tolist(), forward, moved, strict=True):
        of_mini_batch[mini_batch] += there + back
    scored = sum(it.forward(*size) for it in scorings for of_rollout in sizes for size in of_rollout)
    return {
        "train_flops": scored + sum(of_mini_batch[mini_batch] for mini_batch in mini_batches),
        "generation_flops": _sampling(model, batch),
    }


def _sampling(model: ModelFlops, batch: StepBatch) -> float:
    """A group's prompt is read once, and the context of every further branch too."""
    firsts: dict[int, list[tuple[int, int]]] = defaultdict(list)
    prompts, others = {}, 0.0
    for row, branches in zip(batch.rows, batch.branches, strict=True):
        prompts[row.group] = len(row.prompt_token_ids)
        for number, length, num_sampled in branches:
            if number:
                others += model.forward(length, num_sampled)
            else:
                firsts[row.group].append((length, num_sampled))
    return others + sum(model.sampling(length, firsts[group]) for group, length in prompts.items())
