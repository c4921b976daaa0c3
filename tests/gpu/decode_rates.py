"""The two rates of decoding from two measurements, as `gspo plan` puts them together again (planning/times.py)."""

from __future__ import annotations

from dataclasses import dataclass

from gspo.common.host.gpu_kinds import GpuKind

# A pass is never free: at most so many a second.
_MOST_PASSES_S = 10_000.0


@dataclass(frozen=True)
class DecodePass:
    """A pass of decoding in the mean: one token of each sequence.

    Attributes:
        read_bytes: Weights, and the cache of every sequence.
    """

    seconds: float
    read_bytes: float


def decode_rates(alone: DecodePass, together: DecodePass, card: GpuKind) -> dict[str, float]:
    """The rates of seconds = 1 / decode_passes_s + read_bytes / (decode_bytes_share * memory_bytes_s).

    Args:
        alone: That of one sequence.
        together: That of many. If its pass takes as long as one alone, the time is not that of reading.
    """
    fastest = (together.read_bytes - alone.read_bytes) / card.memory_bytes_s
    share = min(1.0, fastest / max(together.seconds - alone.seconds, fastest))
    own_s = alone.seconds - alone.read_bytes / (share * card.memory_bytes_s)
    return {"decode_bytes_share": share, "decode_passes_s": 1 / max(own_s, 1 / _MOST_PASSES_S)}
