"""In what two policies of this host differ, in memory of its own from which vLLM's processes load it in place.

Both are compared, so it does not matter how a policy came here.
"""

import os
import re
import weakref
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from gspo.common.host.machine import free_memory
from gspo.generation.engine.staging import PolicyCopy

# Bytes of the differences, as a share of the policy's: beyond it, as at a tenth of the elements in bfloat16, a whole
# load does not take much longer. And as a share of the free memory, which the generators of a host have in common.
_MOST_OF_POLICY, _MOST_OF_FREE = 0.3, 0.05
# That of the widest elements.
_ALIGNMENT = 4


class Differences:
    """The elements of the staged policy that the serving one has otherwise.

    Attributes:
        kinds: The names of the tensors that differ, without the numbers of layers and experts.
        is_small: Whether so few elements differ that to load them alone is worth it; else they are not all there.
    """

    def __init__(self, serving: PolicyCopy, staged: PolicyCopy) -> None:
        self.kinds: set[str] = set()
        self._tensors: list[dict[str, Any]] = []
        self._file = os.memfd_create("gspo-differences")
        weakref.finalize(self, os.close, self._file)
        self._end = 0
        self.is_small = self._find(serving, staged)

    def update_info(self, tried: Collection[str]) -> dict[str, Any]:
        """The fields of weights.SharedPolicy; a trial, unless all kinds of these tensors have been tried."""
        form = "changes" if self.kinds <= set(tried) else "trial"
        return {"path": f"/proc/{os.getpid()}/fd/{self._file}", "tensors": self._tensors, "form": form}

    def _find(self, serving: PolicyCopy, staged: PolicyCopy) -> bool:
        if serving.fingerprints.keys() != staged.fingerprints.keys():
            return False
        places = [it for it in staged.places.values() if it.name in staged.fingerprints]
        most_bytes = min(sum(it.num_bytes for it in places) * _MOST_OF_POLICY, free_memory() * _MOST_OF_FREE)
        for place in places:
            if serving.fingerprints[place.name] == staged.fingerprints[place.name]:
                continue
            if place.num_elements > np.iinfo(np.int32).max:
                return False
            new = staged.bits(place.name)
            signed = f"i{new.itemsize}"
            differs = torch.from_numpy(serving.bits(place.name).view(signed)) != torch.from_numpy(new.view(signed))
            changed = differs.nonzero().view(-1).numpy()
            if self._end + len(changed) * (4 + new.itemsize) > most_bytes:
                return False
            described = {"name": place.name, "dtype": place.dtype, "shape": place.shape, "num_changed": len(changed)}
            described |= {"positions": self._append(changed.astype(np.int32)), "elements": self._append(new[changed])}
            self._tensors.append(described)
            self.kinds.add(re.sub(r"\d+", "N", place.name))
        return bool(self._tensors)

    def _append(self, array: np.ndarray[Any, Any]) -> int:
        """The offset at which an array lies in the file."""
        begin, data = self._end, array.tobytes() + bytes(-array.nbytes % _ALIGNMENT)
        with os.fdopen(self._file, "wb", closefd=False) as file:
            file.write(data)
        self._end += len(data)
        return begin
