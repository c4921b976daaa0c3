"""The version that is overdue for its evaluation: coordinator and learner decide it alike after a restart."""

from collections.abc import Collection

from gspo.common.config.schema import Config
from gspo.common.streams.keys import evaluation_label


def overdue(config: Config, version: int, recorded: Collection[str]) -> int:
    """The last version up to `version` that is measured during training, if that is not recorded; 0 otherwise.

    If its weights are gone, a later version is measured instead, which counts too.

    Args:
        recorded: The labels of all recorded evaluations.
    """
    every = config.evaluation.every
    due = version - version % every if every else 0
    if not config.is_measured(due):  # the last version of the run is measured at its end
        due -= every
    if not config.is_measured(due):
        return 0
    done = {*recorded}
    for measured in range(due, version + 1):
        if {evaluation_label(measured, file) for file in config.evaluation.files} <= done:
            return 0
    return due
