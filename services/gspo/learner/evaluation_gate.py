"""Records evaluations, and delays newer weights until those of a version are over. best_version.py keeps the best.

consumes: EvaluationDone. waits for: the evaluations of a version, unblocked by the coordinator, given up at a deadline.
"""

import asyncio
import time
from collections.abc import Callable

import structlog

from gspo.common.config.schema import Config
from gspo.common.evaluation_schedule import overdue
from gspo.common.streams.keys import evaluation_label
from gspo.common.tasks import wait_until_set
from gspo.common.telemetry.activity import Activity
from gspo.learner.push.policy_weights import PolicyWeights
from gspo.learner.storage.best_version import BestVersion
from gspo.learner.storage.candidates import (
    WriteShare,
    forget_unmeasured,
    keep_only,
    read_unmeasured,
    save_unmeasured,
)
from gspo.learner.storage.run_directory import RunDir
from gspo_proto.rollout_pb2 import EvaluationDone

# A stop has no signal of its own.
_POLL_S = 0.25
log = structlog.get_logger()


class EvaluationGate:
    """The gate between a version's evaluations and the next version.

    Attributes:
        recorded_unix_s: When the last evaluation was recorded; 0 before the first.

    Args:
        activity: Shows the evaluations that it waits for.
    """

    def __init__(self, config: Config, run_dir: RunDir, activity: Activity) -> None:
        self._config, self._run_dir, self._activity = config, run_dir, activity
        self._figure = config.best_figure
        self._best: BestVersion | None = None
        if self._figure is not None:
            self._best = BestVersion(run_dir.path, self._figure.figure, run_dir.scores(self._figure.weights))
        # A version that is measured in the place of one before it.
        self._stands_in: int | None = None
        self._recorded = asyncio.Event()
        self.recorded_unix_s = 0.0

    @property
    def max_wait_s(self) -> float:
        """Longest that the evaluations of one version may take."""
        return self._config.evaluation.timeout_s * max(1, len(self._config.evaluation.files))

    def begin(self, newest: PolicyWeights) -> PolicyWeights | None:
        """Settle what an earlier process left in `candidates/`.

        Returns:
            An earlier version whose evaluations that process did not end: generators are to serve it until they are
            recorded. None without one. If its weights are gone, the newest version is measured instead.
        """
        due = overdue(self._config, newest.version, self._run_dir.evaluations)
        unmeasured = None
        if 0 < due < newest.version and self._config.evaluation.hold_weights:
            digest = self._run_dir.versions[due].digest if due in self._run_dir.versions else ""
            unmeasured = read_unmeasured(self._run_dir.path, due, digest)
            if unmeasured is not None and unmeasured.dtype != newest.dtype:  # a resume may change the generators'
                unmeasured = None
            self._stands_in = newest.version if unmeasured is None else None
        keep_only(self._run_dir.path, {newest.version} | ({due} if unmeasured else set()))
        return unmeasured

    def keep_unmeasured(self, weights: PolicyWeights, write_share: WriteShare) -> None:
        """Keep a version for the next start if its evaluations are not recorded."""
        if self.holds(weights.version):
            save_unmeasured(self._run_dir.path, weights, write_share)

    async def record(self, done: EvaluationDone) -> None:
        """Record an evaluation, and keep its version if it is the best."""
        await asyncio.to_thread(self._run_dir.append_evaluation, done)
        if self._best is not None and self._figure is not None and done.file in self._figure.weights:
            labels = {evaluation_label(done.version, file) for file in self._figure.weights}
            if labels <= self._run_dir.evaluations.keys():
                score = self._run_dir.scores(self._figure.weights).get(done.version)
                await asyncio.to_thread(self._best.record_score, done.version, score)
        if not self.holds(done.version):
            await asyncio.to_thread(forget_unmeasured, self._run_dir.path, done.version)
        self.recorded_unix_s = time.time()
        self._recorded.set()

    def keeper_of(self, version: int, *, last: bool = False) -> BestVersion | None:
        """The keeper of a version that will be measured: of the start, of one between two steps, or of the last."""
        return self._best if last or version == 0 or self._is_measured(version) else None

    def holds(self, version: int) -> bool:
        """Whether the version after this one has to wait for its evaluations."""
        return bool(self._missing(version))

    async def wait(self, version: int, stopped: Callable[[], bool]) -> None:
        """Wait until all evaluations of a version between two steps are recorded."""
        began = time.monotonic()
        while (missing := self._missing(version)) and not stopped():
            if time.monotonic() - began > self.max_wait_s + self._config.run.start_timeout_s:
                log.warning("evaluation_missing", labels=missing, reason="newer weights are published without it")
                return
            self._activity.set("waiting", "evaluation", ", ".join(missing))
            self._recorded.clear()
            await wait_until_set(self._recorded, _POLL_S)

    def _missing(self, version: int) -> list[str]:
        if not self._config.evaluation.hold_weights or not self._is_measured(version):
            return []
        labels = [evaluation_label(version, file) for file in self._config.evaluation.files]
        return [label for label in labels if label not in self._run_dir.evaluations]

    def _is_measured(self, version: int) -> bool:
        return self._config.is_measured(version) or version == self._stands_in
