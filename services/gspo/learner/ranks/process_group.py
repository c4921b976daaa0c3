"""The process group of the learner's ranks: joining it, sums over it, bytes from rank zero to the others, and back.

Every wait for another rank ends after learner.rank_timeout_s.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from gspo.learner.ranks.launcher import is_launched
from gspo_core.stats import Stats

_LOOPBACKS = ("lo", "lo0")
# Words of the libraries' messages about other ranks; torch has no class for gloo's.
_PEER_ERRORS = ("gloo", "nccl", "connection closed", "timed out", "connection reset", "broken pipe")

# Of gather_bytes.
_LONGEST_MESSAGE = 512


class RanksError(RuntimeError):
    """Another rank has ended, or did not answer in time."""


def join(backend: str, timeout_s: float, device: torch.device) -> None:
    """Join the group of the launcher's ranks, or make one of this process alone, which needs no port.

    Args:
        device: That of the backend. NCCL would otherwise guess a GPU from the rank's number.
    """
    if distributed.is_initialized():
        return
    device_id = None if device.type == "cpu" else device
    if is_launched():
        with rank_errors(timeout_s):
            distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s), device_id=device_id)
    else:
        # gloo listens for other ranks even where there are none, on the address of the host's name.
        for _, interface in socket.if_nameindex():
            if interface in _LOOPBACKS:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1, device_id=device_id)


@contextmanager
def left_at_end() -> Iterator[None]:
    """A block with the work of a process, which leaves the group after it.

    Not after an error: another rank may be gone, and NCCL would wait for it.
    """
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise
        _leave()
        raise
    _leave()


def _leave() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def set_deadlines(timeout_s: float) -> None:
    """Give every group that exists, also those that a library made for itself, the same deadline."""
    for group in list(_world.pg_map):
        _set_pg_timeout(timedelta(seconds=timeout_s), group)


@contextmanager
def rank_errors(timeout_s: float) -> Iterator[None]:
    """Turn the libraries' errors about other ranks into RanksError.

    Raises:
        RanksError: Another rank has ended, or was silent for longer than `timeout_s`.
    """
    try:
        yield
    except RuntimeError as error:
        message = str(error)
        if isinstance(error, RanksError) or not any(word in message.lower() for word in _PEER_ERRORS):
            raise
        raise RanksError(
            f"another rank of the learner has ended, or was silent for more than learner.rank_timeout_s "
            f"({timeout_s:g} s); its own reason is in its log ({message.splitlines()[0]})"
        ) from error


def sum_over_ranks(value: Tensor, device: torch.device) -> Tensor:
    """The sum of a tensor over all ranks, on its own device; `device` is that of the ranks' backend."""
    if distributed.get_world_size() == 1:
        return value
    summed = value.to(device, copy=True)
    distributed.all_reduce(summed)
    return summed.to(value.device)


def sum_stats(stats: Stats, device: torch.device) -> Stats:
    """Sums added up over the ranks, and the largest of maxima. Every rank gives the same names."""
    if distributed.get_world_size() == 1:
        return stats
    summed = {}
    for key in sorted(stats):
        summed[key] = stats[key].to(device, copy=True)  # a tensor may have several names
        kind = distributed.ReduceOp.MAX if key.endswith(".max") else distributed.ReduceOp.SUM
        distributed.all_reduce(summed[key], kind)
    return summed


def gather_bytes(message: bytes, device: torch.device) -> list[bytes]:
    """The short message of every rank, in their order. `device` is that of the ranks' backend."""
    if distributed.get_world_size() == 1:
        return [message]
    own = torch.zeros(_LONGEST_MESSAGE, dtype=torch.uint8)
    own[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    gathered = [torch.empty_like(own, device=device) for _ in range(distributed.get_world_size())]
    distributed.all_gather(gathered, own.to(device))
    return [part.cpu().numpy().tobytes().rstrip(b"\0") for part in gathered]


class RankGather:
    """Bytes of any length from every rank to rank zero, beside collectives of other threads. All create it at once."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def gather(self, message: bytes) -> list[bytes]:
        """The message of every rank, in their order; empty on other ranks than zero.

        Raises:
            RanksError: Another rank has ended, or is silent.
        """
        num_ranks = distributed.get_world_size()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks)]
        with rank_errors(self._timeout_s):
            distributed.all_gather(lengths, torch.tensor([len(message)]), group=self._group)
            own = torch.frombuffer(bytearray(message.ljust(max(1, *map(int, lengths)), b"\0")), dtype=torch.uint8)
            parts = [torch.empty_like(own) for _ in range(num_ranks)] if distributed.get_rank() == 0 else None
            distributed.gather(own, parts, group=self._group)
        return [part.numpy().tobytes()[: int(length)] for part, length in zip(parts or [], lengths, strict=False)]


class RankBroadcast:
    """Bytes from rank zero to all others, over the hosts' network with any device. All ranks create it at once."""

    def __init__(self, timeout_s: float) -> None:
        self._group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def exchange(self, message: bytes = b"") -> bytes:
        """The next message of rank zero, which alone gives one."""
        length = torch.tensor([len(message)])
        distributed.broadcast(length, src=0, group=self._group)
        data = torch.frombuffer(bytearray(message or int(length)), dtype=torch.uint8)
        distributed.broadcast(data, src=0, group=self._group)
        return data.numpy().tobytes()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        distributed.barrier(group=self._group)
