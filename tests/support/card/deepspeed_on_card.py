"""DeepSpeed on the GPU of tensors.py, in a process of its own."""

from __future__ import annotations

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from tests.support.card import tensors

_DEVICE = f"{tensors.NAME}:0"


class CardAccelerator(CPU_Accelerator):  # type: ignore[misc]
    """DeepSpeed's view of the card: that of the CPU, without streams, but for names of devices and backends.

    The backend takes the GPU's tensors alone, as NCCL does those of GPUs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._name, self._communication_backend_name = tensors.NAME, f"{tensors.NAME}:gloo"

    def device_name(self, device_index: int | None = None) -> str:
        """The GPU's."""
        return tensors.NAME if device_index is None else _DEVICE

    def current_device(self) -> str:
        """The GPU's."""
        return _DEVICE

    def current_device_name(self) -> str:
        """The GPU's."""
        return _DEVICE

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the GPU."""
        return tensor.device.type == tensors.NAME


def use_card() -> None:
    """Have this process's trainers compute on the GPU."""
    tensors.register()
    set_accelerator(CardAccelerator())
    torch.cuda.get_device_name = lambda device=None: "a GPU"
