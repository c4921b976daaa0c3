"""Products of bfloat16 matrices on a processor that has no instructions for them.

torch multiplies such matrices there in a plain loop, several times as slowly as float32 ones (docs/learner.md). Here
each product is made in float32 and rounded once, as processors with the instructions make it.
"""

import warnings
from typing import Any

import torch
from torch import DispatchKeySet, Tensor

# Matrix products of torch's CPU kernels; their last two tensors are the factors, but for the grouped product's.
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_GROUPED = "_grouped_mm"
# Below so many rows torch's loop is as fast: float32 copies of a matrix cost as much as reading it four times.
_LEAST_ROWS = 4
# It holds our kernels: torch forgets them when it goes.
_library: torch.library.Library | None = None


def use_float32_products() -> bool:
    """Replace torch's bfloat16 products on the CPU in this process, unless the processor has its own; once is enough.

    Backward passes use them too. Products in float32 stay as they are, bit for bit.

    Returns:
        Whether they are replaced.
    """
    global _library
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name in (*_PRODUCTS, _GROUPED):
                _replace(_library, name)
    return True


def _replace(library: torch.library.Library, name: str) -> None:
    kernel: Any = torch.library.get_kernel(f"aten::{name}", "CPU")

    def product(keys: DispatchKeySet, *arguments: Any, **keywords: Any) -> Tensor:
        factors = arguments[:2] if name == _GROUPED else arguments[-2:]
        if any(factor.dtype != torch.bfloat16 for factor in factors) or factors[0].shape[-2] < _LEAST_ROWS:
            result: Tensor = kernel.call_boxed(keys, *arguments, **keywords)
            return result
        in_float32 = (
            value.float() if isinstance(value, Tensor) and value.is_floating_point() else value for value in arguments
        )
        rounded: Tensor = kernel.call_boxed(keys, *in_float32, **keywords).to(torch.bfloat16)
        return rounded

    library.impl(name, product, "CPU", with_keyset=True)  # type: ignore[no-untyped-call]
