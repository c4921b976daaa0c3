"""In what two policies of this host differ, in memory of its own from which vLLM's processes load it in place.

Both are compared, so it does not matter how a policy came here.
"""

import os
import re
import weakref
from collections.abc import Set as AbstractSet
from typing import Any, Literal

import numpy as np
import torch

from gspo.common.host.machine import free_memory
from gspo.generation.engine.staging import PolicyCopy

# Bytes of the differences, as a share of the policy's: beyond it, as at a tenth of the elements in bfloat16, a whole
# load does not take much longer. And as a share of the free memory, which the generators of a host have in common.
_MOST_OF_POLICY, _MOST_OF_FREE = 0.3, 0.05
# That of the widest elements.
_ALIGNMENT = 4
# Loads in place from one trial to the next.
_MOST_IN_PLACE = 64
Form = Literal["changes", "trial"]


class Trials:
    """The kinds of tensors whose changes an engine has tried: it loaded them in place, and then the whole policy.

    After some loads in place they are tried again. So a fault in an engine's weights, which changes would leave there,
    ends with a whole load, and is noticed.
    """

    def __init__(self) -> None:
        self._kinds: set[str] = set()
        self._num_loads = 0

    def form_of(self, kinds: AbstractSet[str]) -> Form:
        """The form in which changes of these kinds are to be loaded next."""
        if self._num_loads == _MOST_IN_PLACE:
            self._kinds.clear()
        form: Form = "changes" if kinds <= self._kinds else "trial"
        self._num_loads = self._num_loads + 1 if form == "changes" else 0
        self._kinds |= kinds
        return form


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

    def update_info(self, form: Form) -> dict[str, Any]:
        """The fields of weights.SharedPolicy."""
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
