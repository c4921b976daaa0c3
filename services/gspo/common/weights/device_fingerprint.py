"""The fingerprint of common/weights/fingerprint.py where the tensors are, without a copy to the host.

In torch for any device. For CUDA `fingerprint_kernel.py` reads each byte once.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo.common.weights.fingerprint import (
    COLUMN_FACTORS,
    NUM_COLUMNS,
    ROW_BYTES,
    Fingerprint,
    check_width,
    row_factors,
)

# At a time: 64 MiB as 64-bit numbers.
_ROWS = 4096
_WORD_MASK = 2**32 - 1


def device_fingerprint(tensor: Tensor, start: int = 0) -> Tensor:
    """The two lanes of a run of elements, as int64 [2] on its device.

    Args:
        tensor: Contiguous, of 1, 2 or 4 bytes an element.
        start: The first one's flat position in its whole tensor.

    Raises:
        ValueError: The elements are not contiguous, or of another width.
    """
    begin = start * check_elements(tensor)
    end = begin + tensor.nbytes
    # torch cannot view nothing as bytes.
    data = tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    sums = torch.zeros(2, NUM_COLUMNS, dtype=torch.int64, device=tensor.device)
    for chunk in range(begin // ROW_BYTES, -(-end // ROW_BYTES), _ROWS):
        first, last = max(begin, chunk * ROW_BYTES), min(end, (chunk + _ROWS) * ROW_BYTES)
        rows = data.new_zeros((-(-last // ROW_BYTES) - chunk) * ROW_BYTES)
        rows[first - chunk * ROW_BYTES : last - chunk * ROW_BYTES] = data[first - begin : last - begin]
        words = (rows.view(torch.int32).to(torch.int64) & _WORD_MASK).view(-1, NUM_COLUMNS)
        for lane, factors in zip(sums, factors_on(tensor.device, row_factors(chunk, len(words))), strict=True):
            lane += (words * factors[:, None]).sum(0)
    return (sums * factors_on(tensor.device, COLUMN_FACTORS)).sum(1)


def check_elements(tensor: Tensor) -> int:
    """Bytes of an element.

    Raises:
        ValueError: The elements are not contiguous, or of a width that no word consists of.
    """
    if not tensor.is_contiguous():
        raise ValueError("fingerprint: the elements are not contiguous")
    return check_width(tensor.element_size())


def on_host(lanes: Tensor) -> list[Fingerprint]:
    """The fingerprints of lanes [tensors, 2]."""
    return [Fingerprint(first % 2**64, second % 2**64) for first, second in lanes.tolist()]


def factors_on(device: torch.device, factors: NDArray[np.uint64]) -> Tensor:
    """Factors as int64, whose products and sums wrap like those of unsigned numbers."""
    return torch.from_numpy(factors.view(np.int64)).to(device)
