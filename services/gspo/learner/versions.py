"""The policy's versions: each is recorded first, then published, then live.

consumes: weights. produces: log/policy.jsonl, pushes (publisher.py), VersionLive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict

from gspo.common.service.app import Service
from gspo.common.streams.events import Events
from gspo.common.telemetry import metrics
from gspo.learner.assembly.settlements import Settlements
from gspo.learner.push.policy_weights import PolicyWeights
from gspo.learner.push.publisher import Publisher
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.telemetry.step_clock import StepClock
from gspo.learner.training.trainer_api import Hyperparameters
from gspo_proto.rollout_pb2 import Event, VersionLive


class Versions:
    """The newest version of the policy.

    Attributes:
        publisher: Pushes it to the generators.

    Args:
        weights: Of the version that the run directory has recorded last.
    """

    def __init__(
        self, service: Service, run_dir: RunDir, weights: PolicyWeights, events: Events, clock: StepClock
    ) -> None:
        self._run_dir, self._events, self._clock = run_dir, events, clock
        self._groups_in_training: Sequence[int] = ()
        self.publisher = Publisher(service, run_dir.epoch, self._announce_live)
        self._make_newest(weights)

    @property
    def number(self) -> int:
        """Of the newest version; step s makes version s."""
        return self._newest.version

    @property
    def digest(self) -> str:
        """Of the newest version's weights."""
        return self._newest.digest

    def settlements(self) -> Settlements:
        """How groups ended; those in training are left out.

        They are settled on disk, but their slots are free only when the version made of them is the newest.
        """
        return self._run_dir.settlements.without(self._groups_in_training)

    def begin_training(self, groups: Sequence[int]) -> None:
        """The next version is made of these groups."""
        self._groups_in_training = groups

    async def record(self, weights: PolicyWeights, hyperparameters: Hyperparameters) -> None:
        """Record a version in the run directory; then it is the newest."""
        await asyncio.to_thread(
            self._run_dir.append_version,
            weights.version,
            weights.digest,
            weights.dtype,
            asdict(hyperparameters),
        )
        self._make_newest(weights)

    def publish(self) -> None:
        """Push the newest version to every generator."""
        self._clock.publish(self.number)
        self.publisher.publish(self._newest)

    def _make_newest(self, weights: PolicyWeights) -> None:
        self._newest = weights
        self._groups_in_training = ()
        metrics.POLICY_VERSION.set(weights.version)
        metrics.STEP.set(weights.version)

    async def _announce_live(self, live: VersionLive) -> None:
        self._clock.live(live.version)
        await self._events.send(Event(version_live=live))
