"""What `evaluation.keep_best` names: a figure of one held-out file, by which the best version is kept.

It knows which figures an evaluation will have, and computes none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gspo.common.config.environment import ENVIRONMENT_PART
from gspo.common.errors import nearest

if TYPE_CHECKING:
    from gspo.common.config.schema import Config


class BestFigure(NamedTuple):
    """A figure of a held-out file; the file's name is empty where it has none."""

    file: str
    figure: str


def best_figure(config: Config) -> BestFigure | None:
    """The figure of evaluation.keep_best; None where it is not set.

    Raises:
        ValueError: It names a figure that no evaluation will have, or one that would be of several versions.
    """
    wanted = config.evaluation.keep_best
    if wanted is None:
        return None
    files = list(config.evaluation.files)
    if not files:
        raise ValueError(
            f"evaluation.keep_best: {wanted} is measured on held-out prompts, and there are none. "
            "Set evaluation.prompts, or leave keep_best out"
        )
    if not config.evaluation.hold_weights:
        raise ValueError(
            f"evaluation.keep_best: {wanted} would be of several versions under hold_weights: false. "
            "Set evaluation.hold_weights: true, or leave keep_best out"
        )
    prefix, slash, rest = wanted.partition("/")
    found = BestFigure(prefix, rest) if slash and prefix in files else BestFigure(files[0], wanted)
    _check_figure(config, found.figure)
    return found


def _check_figure(config: Config, figure: str) -> None:
    evaluation = config.evaluation
    known = ["sampled_mean", *(f"pass_at_{k}" for k in evaluation.pass_ks), f"best_at_{evaluation.num_answers}"]
    known += ["greedy_mean"] if evaluation.greedy else []
    # A function may return named parts: those come as part_FUNCTION/NAME_mean, and only the function knows them.
    labels = [function.label for function in config.reward.functions]
    labels += [ENVIRONMENT_PART] if config.environment.used else []
    known += [f"part_{label}_mean" for label in labels] if len(labels) > 1 else []
    part_of_function = any(figure.startswith(f"part_{label}/") and figure.endswith("_mean") for label in labels)
    if figure not in known and not part_of_function:
        raise ValueError(
            f"evaluation.keep_best: {figure} is no figure of an evaluation that grows as the policy gets better. "
            f"{nearest(figure, known)}"
        )
