"""vLLM's kernels that check draft tokens, put right where they are wrong; it runs inside vLLM's processes.

Rejection sampling makes an answer with drafts a sample of the policy (arXiv 2211.17192, algorithm 1), if its kernels
work. On a CPU two of vLLM's do not. Each is replaced only where its result is wrong. Not here: the kernels of GPUs, for
which vLLM has Triton.

Suffixes: B requests, T draft tokens of all requests one after the other, V vocabulary, K tokens of one request in one
step, -1 where it has fewer.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler


def repair_kernels() -> None:
    """Replace each kernel of this process that gives a wrong result, and none that is right.

    Raises:
        RuntimeError: A kernel is wrong, and so is ours in its place.
    """
    for name in _wrong_kernels():
        # vLLM's own way to put a function in a kernel's place searches all modules, and fails at one of numba's.
        if isinstance(kernel := getattr(rejection_sampler, name, None), KernelOverride):
            kernel._impl = _CHECKED[name][1]
    if wrong := _wrong_kernels():
        raise RuntimeError(
            f"generation.draft_tokens: vLLM's {' and '.join(wrong)} cannot be put right on this CPU, so drafts would "
            "not be checked against the policy. Set draft_tokens: 0, or install the version of vLLM that gspo locks"
        )


def _wrong_kernels() -> list[str]:
    wrong = []
    for name, (is_right, _) in _CHECKED.items():
        try:
            if not is_right():
                wrong.append(name)
        except (AttributeError, TypeError):  # this vLLM calls it in another way
            wrong.append(name)
    return wrong


def _expands() -> bool:
    """Whether each request's temperature reaches its draft tokens, with 1 in place of 0.

    No tensor holds the expected values, so none can be left in the memory that a kernel does not write.
    """
    temperature_B, end_B = torch.tensor([0.5, 0.0, 0.75, 0.25]), torch.tensor([2, 3, 3, 5], dtype=torch.int32)
    temperature_T = rejection_sampler.expand_batch_to_tokens(temperature_B, end_B, 5, replace_from=0, replace_to=1)
    return bool(temperature_T.tolist() == [0.5, 0.5, 1.0, 0.25, 0.25])


def _rejects_placeholders() -> bool:
    """Whether -1, by which the scheduler fills up the drafts of a request, is rejected as Triton's kernel does.

    The element before the row of the placeholder is as likely as can be.
    """
    output_BK = torch.full((1, 3), -1, dtype=torch.int32)
    rejection_sampler._rejection_random_sample(
        output_BK,
        torch.tensor([2], dtype=torch.int32),
        torch.tensor([0, -1], dtype=torch.int32),
        None,
        torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
        torch.tensor([[1]], dtype=torch.int32),
        torch.tensor([1, 0], dtype=torch.int32),
        torch.tensor([0.5, 0.5], dtype=torch.float64),
        torch.tensor([False]),
        2,
        None,
    )
    return bool(output_BK.tolist() == [[0, 0, -1]])


def _expand(output_T: Tensor, value_B: Tensor, end_B: Tensor, replace_from: int, replace_to: int, _most: int) -> None:
    """Write each request's value for each of its drafts; vLLM writes to a copy, which it drops (its issue 55005)."""
    num_drafts_B = end_B.diff(prepend=end_B.new_zeros(1))
    output_T.copy_(value_B.where(value_B != replace_from, replace_to).repeat_interleave(num_drafts_B))


def _reject(
    output_BK: Tensor,
    end_B: Tensor,
    draft_T: Tensor,
    draft_probs_TV: Tensor | None,
    probs_TV: Tensor,
    bonus_B: Tensor,
    recovered_T: Tensor,
    uniform_T: Tensor,
    *more: Any,
) -> None:
    """vLLM's kernel, which would take the element before a row for the probability of a placeholder."""
    never_T = uniform_T.masked_fill(draft_T < 0, math.inf)
    cpu_triton_utils._rejection_random_sample_kernel_impl(
        output_BK, end_B, draft_T.clamp(min=0), draft_probs_TV, probs_TV, bonus_B, recovered_T, never_T, *more
    )


# Kernel -> whether it is right, and the one to put in its place.
_CHECKED: Mapping[str, tuple[Callable[[], bool], Callable[..., None]]] = {
    "expand_kernel": (_expands, _expand),
    "rejection_random_sample_kernel": (_rejects_placeholders, _reject),
}
