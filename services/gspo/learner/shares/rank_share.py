"""Makes this rank's share of a version beside training, and on rank zero the version of all shares.

policy_engine.py copies the tensors. consumes: copies. produces: versions; shares in the rank's server.
waits for: the manifests of the other ranks, on rank zero.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed

from gspo.learner.push.policy_weights import PolicyWeights, RankManifest, joined, own_weights, rank_manifest
from gspo.learner.ranks.process_group import RankGather, RanksError, gather_bytes
from gspo.learner.shares.share_server import ShareServer

_OWN_LOG = "its own reason is in its log"


class RankShare:
    """The share of one rank. Every rank makes the same versions in the same order.

    Attributes:
        place: This rank's place among those that own layers; -1 if it owns none.
        num_owners: Ranks that own layers.

    Args:
        device: That of the ranks' backend.
        timeout_s: Longest wait for another rank.
        server: Serves it to generators, on other ranks than zero; None where nothing is pushed.
    """

    def __init__(self, device: torch.device, timeout_s: float, server: ShareServer | None) -> None:
        self._server = server
        self._gather = RankGather(timeout_s) if distributed.get_world_size() > 1 else None
        owning = _reachable_ranks(device, is_anywhere=server is None or not server.is_on_loopback)
        rank = distributed.get_rank()
        self.place, self.num_owners = owning.index(rank) if rank in owning else -1, len(owning)

    def forget_older(self) -> None:
        """Let earlier versions go, as far as their changes are packed, before the next copy takes memory."""
        if self._server is not None:
            self._server.forget_older()

    def make(self, version: int, tensors: Mapping[str, Tensor], recorded: str) -> PolicyWeights:
        """The version; on other ranks than zero their tensors alone. The arguments as for `weights_from`.

        Raises:
            NotFiniteError: On rank zero: a weight of any rank is infinite or NaN.
            RanksError: Another rank has failed or ended, or is silent.
        """
        try:
            own, manifest = self._make_own(version, tensors, recorded)
        except BaseException:
            # The others wait for this rank.
            self._exchange(b"")
            raise
        parts = self._exchange(manifest.to_bytes())
        if absent := [rank for rank, line in enumerate(parts) if not line]:
            raise RanksError(
                f"rank {absent[0]} of the learner could not make its share of version {version}; {_OWN_LOG}"
            )
        return joined(version, own, [RankManifest.from_bytes(line) for line in parts]) if parts else own

    def _make_own(
        self, version: int, tensors: Mapping[str, Tensor], recorded: str
    ) -> tuple[PolicyWeights, RankManifest]:
        """This rank's share; generators may pull it from now on."""
        own, address = own_weights(version, tensors), self._server.address if self._server is not None else ""
        manifest = rank_manifest(tensors, recorded, address)
        if self._server is not None:
            self._server.add(own)
        return own, manifest

    def _exchange(self, message: bytes) -> list[bytes]:
        """The message of every rank; empty on other ranks than zero."""
        return [message] if self._gather is None else self._gather.gather(message)

    def write(self, version: int, folder: Path) -> None:
        """Write the share of one of the last two versions, on other ranks than zero."""
        if self._server is not None:
            write_tensors(self._server.own_weights(version), folder, distributed.get_rank())


def _reachable_ranks(device: torch.device, *, is_anywhere: bool) -> list[int]:
    """The ranks that generators reach: those on rank zero's host, and those that listen beyond loopback.

    Generators reach rank zero, or run on its host.

    Args:
        is_anywhere: Whether this rank listens beyond loopback.
    """
    # Two containers of one machine have a loopback each.
    host = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/net').readlink()}"
    known = [json.loads(line) for line in gather_bytes(json.dumps([host, is_anywhere]).encode(), device)]
    return [rank for rank, (name, anywhere) in enumerate(known) if anywhere or name == known[0][0]]


def write_tensors(own: PolicyWeights, folder: Path, rank: int) -> None:
    """Write a rank's tensors of a version as a file of a model folder."""
    tensors = {name: torch.from_numpy(bits).view(getattr(torch, own.dtype)) for name, bits in own.bits.items()}
    save_file(tensors, folder / f"share-{rank:05d}.safetensors")
