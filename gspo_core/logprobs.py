"""Log-probs and entropies of target tokens straight from hidden states, never holding all logits at once.

Not here: the model. The output weight is its only part that is seen, and the temperature its only setting.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Numbers that softmax works on at a time, 16 MiB in float32: from pass to pass they stay in the processor's cache.
BLOCK_NUMBERS = 2**22
# On a GPU so many, or so many rows: its time goes into starting kernels where blocks are small.
_GPU_BLOCK_NUMBERS, _GPU_BLOCK_ROWS = 2**24, 256


def token_logprobs(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    target_BT: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target token and entropy of its distribution under z = hidden weight^T / temperature.

        logp = z_y - log sum_v exp(z_v)          entropy = -sum_v p_v log p_v,  p = softmax(z)

    `hidden_BTD` is [..., D] with any leading dimensions and `target_BT` has those: [B, T, D] and [B, T], or only
    the rows that count, [N, D] and [N]. `hidden` at position t must be the state that predicts target t.
    Returns two tensors shaped like `target_BT`, in float32 (float64 if an input is), also under autocast.
    Both are exact and differentiable, once, in hidden and weight. Memory holds at most chunk_size x V logits and
    probabilities at a time, forward or backward: the backward pass makes them again.

    Under bf16 hidden states, weight and gradient of the logits are rounded to bf16 as factors, and products still add
    up in float32. A weight of another dtype is copied for each pass.
    ValueError: shapes, a target outside the vocabulary, temperature or chunk_size not above 0.
    """
    check_inputs(hidden_BTD, weight_VD, target_BT, temperature, chunk_size)
    hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    target_N = target_BT.reshape(-1).long()
    logp_N, entropy_N = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, target_N, temperature, chunk_size
    )
    return logp_N.view(target_BT.shape), entropy_N.view(target_BT.shape)


class _TokenLogprobs(torch.autograd.Function):
    """With y the target, H the entropy, g and e the gradients that arrive for logp and entropy:

    d logp / d z_v = [v = y] - p_v
    d H / d z_v    = -p_v (log p_v + H)
    so  dz_v = g [v = y] - p_v (g + e (log p_v + H)),   dhidden = dz weight / temperature
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float, chunk_size: int
    ) -> tuple[Tensor, Tensor]:
        products = Products(hidden_ND, weight_VD, temperature)
        logp_N = hidden_ND.new_empty(len(hidden_ND), dtype=products.dtype)
        entropy_N = torch.empty_like(logp_N)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for _, _, _, blocks in _chunks(hidden_ND, products, chunk_size):
                for rows, z_SV, logp_SV in blocks:
                    logp_N[rows] = logp_SV.gather(1, target_N[rows, None])[:, 0]
                    p_SV = torch.exp(logp_SV, out=z_SV)
                    entropy_N[rows] = -logp_SV.mul_(p_SV).sum(-1)
        ctx.save_for_backward(hidden_ND, weight_VD, target_N, entropy_N)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_N: Tensor | None, e_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, target_N, entropy_N = ctx.saved_tensors
        products = Products(hidden_ND, weight_VD, ctx.temperature)
        gradients = InputGradients(products, hidden_ND, weight_VD, ctx.needs_input_grad)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for chunk, h_RD, dz_RV, blocks in _chunks(hidden_ND, products, ctx.chunk_size):
                for rows, z_SV, logp_SV in blocks:
                    g_S1 = None if g_N is None else g_N[rows, None]
                    e_S1 = None if e_N is None else e_N[rows, None]
                    _replace_by_gradient(z_SV, logp_SV, target_N[rows, None], entropy_N[rows, None], g_S1, e_S1)
                gradients.add(chunk, h_RD, products.rounded(dz_RV))
        return gradients.hidden_ND, gradients.weight_VD, None, None, None


def _replace_by_gradient(
    z_SV: Tensor, logp_SV: Tensor, target_S1: Tensor, entropy_S1: Tensor, g_S1: Tensor | None, e_S1: Tensor | None
) -> None:
    """Write dz into z: the class above says which; None is a gradient of 0. logp is lost."""
    p_SV = torch.exp(logp_SV, out=z_SV)
    if e_S1 is None:
        p_SV.mul_(0.0 if g_S1 is None else -g_S1)
    else:
        p_SV.mul_(logp_SV.add_(entropy_S1).mul_(-e_S1).sub_(0.0 if g_S1 is None else g_S1))
    if g_S1 is not None:
        p_SV.scatter_add_(1, target_S1, g_S1)


class Products:
    """The matrix products of one pass, divided by the temperature.

    Attributes:
        dtype: That of sums, log-probs and entropies.
        precision: Factors are rounded to it.
        stored: The dtype that rounded factors have.
        weight_VD: The output weight as a factor.
    """

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, temperature: float) -> None:
        self.dtype = torch.promote_types(torch.result_type(hidden_ND, weight_VD), torch.float32)
        self._scale = 1 / temperature
        is_low = hidden_ND.dtype == torch.bfloat16 and self.dtype == torch.float32
        self.precision = torch.bfloat16 if is_low else self.dtype
        # Only a GPU multiplies bf16 and adds up in float32. In float32 the products of bf16 numbers are exact.
        self.stored = self.precision if hidden_ND.is_cuda else self.dtype
        self.weight_VD = self.rounded(weight_VD)

    def rounded(self, tensor: Tensor) -> Tensor:
        """A tensor as a factor of a product."""
        return tensor.to(self.precision).to(self.stored)

    def put(self, out: Tensor, a: Tensor, b: Tensor, *, beta: int = 0) -> Tensor:
        """Set `out` to beta out + a b / temperature, a and b as factors; returns it."""
        if a.dtype == out.dtype:
            return torch.addmm(out, a, b, beta=beta, alpha=self._scale, out=out)
        return torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, alpha=self._scale, out=out)

    def chunks(self, hidden_ND: Tensor, num_rows: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield (rows, their states as a factor, logits), num_rows at a time; the next turn overwrites the logits."""
        step = min(num_rows, max(1, len(hidden_ND)))
        z_buffer = hidden_ND.new_empty(step, len(self.weight_VD), dtype=self.dtype)
        for start in range(0, len(hidden_ND), step):
            rows = slice(start, min(start + step, len(hidden_ND)))
            h_RD = self.rounded(hidden_ND[rows])
            yield rows, h_RD, self.put(z_buffer[: len(h_RD)], h_RD, self.weight_VD.T)


class InputGradients:
    """The gradients of states and output weight, from those of the logits of all rows, some rows at a time.

    Args:
        are_needed: Whether each of the two is, at the first two places.

    Attributes:
        hidden_ND: Gradient of the states; None without.
    """

    def __init__(self, products: Products, hidden_ND: Tensor, weight_VD: Tensor, are_needed: Sequence[bool]) -> None:
        self._products, self._dtype = products, weight_VD.dtype
        self.hidden_ND = torch.empty_like(hidden_ND) if are_needed[0] else None
        self._sum_VD = torch.zeros_like(weight_VD, dtype=products.dtype) if are_needed[1] else None

    def add(self, rows: slice, h_RD: Tensor, dz_RV: Tensor) -> None:
        """Take in some rows: their states and the gradients of their logits, both as factors."""
        if self.hidden_ND is not None:
            out_RD = h_RD.new_empty(h_RD.shape, dtype=self._products.dtype)
            self.hidden_ND[rows] = self._products.put(out_RD, dz_RV, self._products.weight_VD)
        if self._sum_VD is not None:
            self._products.put(self._sum_VD, dz_RV.T, h_RD, beta=1)

    @property
    def weight_VD(self) -> Tensor | None:
        """Gradient of the output weight, in its dtype; None without."""
        return None if self._sum_VD is None else self._sum_VD.to(self._dtype)


Block = tuple[slice, Tensor, Tensor]


def _chunks(
    hidden_ND: Tensor, products: Products, chunk_size: int
) -> Iterator[tuple[slice, Tensor, Tensor, Iterator[Block]]]:
    """Yield (rows, their states as a factor, logits, blocks), the logits in a buffer that the next turn reuses.

    Half of chunk_size is enough rows for a fast product, and leaves memory for the log-probs of a block. One buffer,
    made once, also spares the CPU the page faults of fresh memory in every turn.
    """
    step = max(1, chunk_size // 2)
    num_rows, vocabulary = min(step, max(1, len(hidden_ND))), len(products.weight_VD)
    rows_at_a_time = BLOCK_NUMBERS // vocabulary
    if hidden_ND.is_cuda:  # it has no such cache
        rows_at_a_time = min(num_rows // 2, max(_GPU_BLOCK_ROWS, _GPU_BLOCK_NUMBERS // vocabulary))
    logp_buffer = hidden_ND.new_empty(min(num_rows, max(1, rows_at_a_time)), vocabulary, dtype=products.dtype)
    for rows, h_RD, z_RV in products.chunks(hidden_ND, step):
        yield rows, h_RD, z_RV, _blocks(rows.start, z_RV, logp_buffer)


def _blocks(start: int, z_RV: Tensor, logp_buffer: Tensor) -> Iterator[Block]:
    """Yield (rows, logits, log-probs) of a few rows of a chunk at a time; its first row is row `start` of all."""
    for first in range(0, len(z_RV), len(logp_buffer)):
        z_SV = z_RV[first : first + len(logp_buffer)]
        logp_SV = torch.log_softmax(z_SV, -1, out=logp_buffer[: len(z_SV)])
        yield slice(start + first, start + first + len(z_SV)), z_SV, logp_SV


def check_inputs(hidden: Tensor, weight_VD: Tensor, target: Tensor, temperature: float, chunk_size: int) -> None:
    """Refuse inputs of `token_logprobs` with a ValueError; [..., D], [V, D] and [...]."""
    if weight_VD.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)}, weight {tuple(weight_VD.shape)}; they must be [..., D], [V, D]"
        )
    if hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"target has shape {tuple(target.shape)}, hidden {tuple(hidden.shape)}; "
            "target must have all dimensions of hidden but the last"
        )
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1")
    # One comparison here: on a GPU an index out of bounds would end the whole process's CUDA context.
    if target.numel() and not bool(((target >= 0) & (target < len(weight_VD))).all()):
        raise ValueError(
            f"target holds ids from {int(target.min())} to {int(target.max())}; "
            f"the vocabulary has 0 to {len(weight_VD) - 1}. Give only rows that count, or 0 as padding"
        )
