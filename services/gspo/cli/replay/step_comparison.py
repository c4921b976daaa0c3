"""Compares a replayed step with the recorded one: its digest, and every figure that training computes."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gspo.runlog.run_log import StepRecord, VersionRecord
from gspo.runlog.step_files import read_columns, step_file

DIGEST = "digest"
# Below it a figure is rounding alone.
_SMALLEST = 1e-6
# Of the mismatch with the engines. Without tokens of the newest version a probe measures them, whose weights depend on
# when the process began.
_OF_PROBE = {
    *("sigma_token", "sigma_sequence", "mismatch_tokens", "noise_share", "noise_share_independent", "noise_clip"),
    *("outside_clip_noise", "outside_clip_lag"),
}


@dataclass(frozen=True)
class ComparedValue:
    """A figure or the digest of a step, recorded and replayed.

    Attributes:
        is_equal: Under the comparison's rule; None where they are not compared.
    """

    step: int
    name: str
    recorded: float | str | None
    replayed: float | str | None
    is_equal: bool | None

    @property
    def difference(self) -> float | None:
        """Replayed less recorded; None of a digest, and where one of them is missing."""
        if isinstance(self.recorded, float) and isinstance(self.replayed, float):
            return self.replayed - self.recorded
        return None


class StepComparison:
    """Compares the steps of one replay.

    Args:
        tolerance: Largest relative difference of a figure, to its own or its largest recorded size; None compares
            bits, and digests too.
        steps: The recorded steps.
        log_folder: With the step files of the replay.
    """

    def __init__(self, tolerance: float | None, steps: Mapping[int, StepRecord], log_folder: Path) -> None:
        self._tolerance, self._steps, self._log_folder = tolerance, steps, log_folder
        self._sizes: dict[str, float] = {}
        for record in steps.values():
            for name, value in record.figures.items():
                self._sizes[name] = max(self._sizes.get(name, _SMALLEST), abs(value))

    def version(self, recorded: VersionRecord | None, replayed: VersionRecord) -> ComparedValue:
        """Compare digests, which are of weights in one dtype."""
        before = recorded.digest if recorded else None
        is_equal: bool | None = None
        if recorded and self._tolerance is None and recorded.dtype == replayed.dtype:
            is_equal = recorded.digest == replayed.digest
        return ComparedValue(replayed.version, DIGEST, before, replayed.digest, is_equal)

    def figures(self, replayed: StepRecord) -> list[ComparedValue]:
        """Compare the figures that both have, by name."""
        recorded = self._steps.get(replayed.step)
        before = recorded.figures if recorded else {}
        values = [
            self._figure(replayed.step, name, before.get(name), value) for name, value in replayed.figures.items()
        ]
        if any(value.is_equal is False and value.name in _OF_PROBE for value in values) and self._is_probed(
            replayed.step
        ):
            values = [value for value in values if value.name not in _OF_PROBE]
        return values

    def _figure(self, step: int, name: str, before: float | None, after: float) -> ComparedValue:
        is_equal = None if before is None else before == after
        if before is not None and self._tolerance is not None:
            size = max(abs(before), abs(after), self._sizes.get(name, _SMALLEST))
            is_equal = math.isclose(before, after, rel_tol=0.0, abs_tol=self._tolerance * size)
        return ComparedValue(step, name, before, after, is_equal)

    def _is_probed(self, step: int) -> bool:
        """Whether no counted token of a step is of the version before it."""
        path = step_file(self._log_folder, step)
        table = read_columns(path, ["version", "mask", "skipped"]).to_pylist()
        return not any(
            counts and version == step - 1
            for row in table
            if row["skipped"] is None
            for version, counts in zip(row["version"], row["mask"], strict=True)
        )


def first_difference(values: Iterable[ComparedValue]) -> ComparedValue | None:
    """The first value that is not the recorded one, in the order given."""
    return next((value for value in values if value.is_equal is False), None)
