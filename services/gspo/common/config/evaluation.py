"""The sections `evaluation`, `rules` and `tracking`: held-out prompts, rules over figures, programs that show them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from gspo.common.config.engines import Temperature
from gspo.common.config.fields import FIXED, ON_RESUME, FilePath, Owner, RunName, Section
from gspo.common.errors import NO_VALUE, ConfigError, nearest
from gspo.common.telemetry.figure_names import FIGURES, MEASURED_FIGURES, is_figure, present_name

# Figures part_NAME_mean of a step or an evaluation, at most: their names come from the user's functions.
MOST_PARTS = 32
Share = Annotated[float, Field(ge=0, le=1)]


class BestFigure(NamedTuple):
    """A figure, as the weighted mean over held-out files; a file's name is empty where it has none.

    Attributes:
        weights: File -> weight of its figure.
    """

    weights: dict[str, float]
    figure: str


class EvaluationConfig(Section):
    """Measuring the policy on prompts that are never trained on."""

    may_change = True
    OWNER = Owner("evaluation.prompts", lambda evaluation: evaluation.prompts is not None, ("prompts",))

    prompts: FilePath | dict[RunName, FilePath] | None = Field(
        None,
        description="Held-out prompts as in data.prompts, or several files by name; null: no evaluation. With several "
        "sources each file has the name of its source",
        json_schema_extra=FIXED,
    )
    num_answers: PositiveInt = Field(4, description="Sampled answers to each prompt")
    temperature: Temperature | None = Field(
        None,
        description="Temperature of these answers, above 0: greedy answers are apart; null: that of training, by "
        "source",
    )
    top_p: float | None = Field(
        None,
        gt=0,
        le=1,
        description="They are sampled from the likeliest tokens that reach this probability together; null: as in "
        "training",
    )
    greedy: bool = Field(True, description="One greedy answer to each prompt beside the sampled ones")
    pass_reward: float = Field(1.0, description="An answer with at least this reward passes, in pass@k")
    every: int = Field(20, ge=0, description="Steps between evaluations while training; 0 is before and after only")
    limit: PositiveInt | None = Field(None, description="Use only the first so many prompts of each file")
    limit_between: PositiveInt | None = Field(
        None, description="Number of prompts of each file between the first and the last evaluation"
    )
    hold_weights: bool = Field(
        True,
        description="Delay newer weights until an evaluation ends, so that it measures one version; false: no "
        "delay, newest_version names the last version",
    )
    keep_best: str | None = Field(
        None,
        description="Keep the version with the highest figure as best/: sampled_mean, greedy_mean, pass_at_K, "
        "best_at_K or part_FUNCTION_mean, of the first file or as FILE/FIGURE. With several sources: the mean "
        "over all files by data.sources.N.weight",
        json_schema_extra=FIXED,
    )
    timeout_s: PositiveFloat = Field(1800.0, description="An evaluation of one file that takes longer is given up")

    @field_validator("prompts", mode="before")
    @classmethod
    def _file_or_named_files(cls, value: Any) -> Any:
        if value is None or isinstance(value, str | Path) or (isinstance(value, dict) and value):
            return value
        raise ConfigError(
            "",
            value,
            "is neither a file nor files by name",
            "Write one path, or a line `name: path` for each file below the key",
        )

    @property
    def files(self) -> dict[str, Path]:
        """The files by name, in the user's order; a single one has an empty name. The first is the headline's."""
        if self.prompts is None:
            return {}
        return dict(self.prompts) if isinstance(self.prompts, dict) else {"": self.prompts}

    @property
    def headline(self) -> str:
        """The name of the first held-out file; empty for a single one, and without any."""
        return next(iter(self.files), "")

    @property
    def pass_ks(self) -> tuple[int, ...]:
        """The k for which pass@k is reported: powers of two, and num_answers."""
        powers = {1 << exponent for exponent in range(self.num_answers.bit_length())}
        return tuple(sorted(powers | {self.num_answers}))

    def best_figure(self, part_labels: Mapping[str, Sequence[str]], weights: Mapping[str, float]) -> BestFigure | None:
        """The figure that `keep_best` names; None where it is not set.

        Args:
            part_labels: For each file, the names of the reward functions and the environment, whose values are parts of
                the score.
            weights: File -> weight, of the files that are compared where keep_best names none.

        Raises:
            ConfigError: No evaluation has this figure, or it would be of several versions.
        """
        if self.keep_best is None:
            return None
        if not self.hold_weights:
            raise ConfigError(
                "evaluation.keep_best",
                self.keep_best,
                "would be of several versions under hold_weights: false",
                "Set evaluation.hold_weights: true, or leave keep_best out",
            )
        prefix, slash, rest = self.keep_best.partition("/")
        names_file = bool(slash) and prefix in self.files
        best = BestFigure({prefix: 1.0}, rest) if names_file else BestFigure(dict(weights), self.keep_best)
        for file in best.weights:
            self._check_figure(best.figure, part_labels[file])
        return best

    def _check_figure(self, figure: str, part_labels: Sequence[str]) -> None:
        known = ["sampled_mean", *(f"pass_at_{k}" for k in self.pass_ks), f"best_at_{self.num_answers}"]
        known += ["greedy_mean"] if self.greedy else []
        known += [f"part_{label}_mean" for label in part_labels] if len(part_labels) > 1 else []
        # A function may return named parts, part_FUNCTION/NAME_mean, and only the function knows their names.
        starts = tuple(f"part_{label}/" for label in part_labels)
        if figure not in known and not (figure.startswith(starts) and figure.endswith("_mean")):
            rule = "is not a figure of an evaluation that grows as the policy gets better"
            raise ConfigError("evaluation.keep_best", figure, rule, nearest(figure, known))

    @staticmethod
    def key_of(name: str) -> str:
        """The configuration key of a file."""
        return f"evaluation.prompts.{name}" if name else "evaluation.prompts"


class OwnRule(Section):
    """A rule of the user's own: a finding while a figure is beyond a bound in each of the last steps."""

    may_change = True

    name: RunName = Field(description="Name of the finding, shown as own_NAME")
    figure: str = Field(description="Figure of a step, or held_out_mean")
    above: float | None = Field(None, description="The figure is above this; or set below")
    below: float | None = Field(None, description="The figure is below this")
    steps: PositiveInt = Field(5, description="In so many steps in a row; of held_out_mean, so many evaluations")
    text: str = Field(min_length=1, max_length=500, description="The finding's sentence")
    tries: tuple[str, ...] = Field((), description="Changes to try, in their order")

    @field_validator("figure")
    @classmethod
    def _is_known(cls, figure: str) -> str:
        if is_figure(present_name(figure)):
            return present_name(figure)
        rule = "is not a figure of a step (docs/metrics.md lists them)"
        raise ConfigError("", figure, rule, nearest(figure, sorted({*FIGURES, *MEASURED_FIGURES})))

    def problems(self) -> Iterator[ConfigError]:
        if (self.above is None) == (self.below is None):
            yield ConfigError("", NO_VALUE, "needs one bound", "Set either above or below")


class BoundsConfig(Section):
    """The bounds of rules that have a share as their only one."""

    may_change = True

    weak_signal: Share = Field(0.8, description="Groups with equal rewards")
    cut_off: Share = Field(0.5, description="Answers that are cut off")
    rollouts_fail: Share = Field(0.5, description="Rollouts without a score")
    answers_alike: Share = Field(0.8, description="Answers that are one text")
    clipped_too_much: Share = Field(0.4, description="Clipped sequences, or tokens where the clip is theirs")
    clip_is_noise: Share = Field(0.05, description="Sequences outside the clip by the engines' noise alone")


class RulesConfig(Section):
    """The rules that say whether a run learns."""

    may_change = True

    bounds: BoundsConfig = Field(default_factory=BoundsConfig)
    own: tuple[OwnRule, ...] = Field((), description="Rules of your own")

    @field_validator("own")
    @classmethod
    def _have_names_of_their_own(cls, own: tuple[OwnRule, ...]) -> tuple[OwnRule, ...]:
        names = [rule.name for rule in own]
        for place, name in enumerate(names):
            if name in names[:place]:
                raise ConfigError(f"{place}.name", name, "names two rules", "Give each a name of its own")
        return own


class WandbConfig(Section):
    """Weights & Biases."""

    OWNER = Owner("tracking.wandb.project", lambda wandb: wandb.project is not None, ("project",))
    project: str | None = Field(
        None, min_length=1, description="Project that the run is shown in; none is off", json_schema_extra=ON_RESUME
    )
    entity: str | None = Field(None, description="User or team; your own by default", json_schema_extra=ON_RESUME)
    mode: Literal["online", "offline"] = Field(
        "online",
        description="offline needs no network and no key: `wandb sync` sends it later",
        json_schema_extra=ON_RESUME,
    )
    group: str | None = Field(None, description="Group of runs that belong together", json_schema_extra=ON_RESUME)
    tags: tuple[str, ...] = Field((), description="Tags of the run", json_schema_extra=ON_RESUME)


class TrackingConfig(Section):
    """Where figures are shown beside Prometheus and the report; each tracker is a process of its own."""

    may_change = True

    tensorboard: bool = Field(False, description="Write event files to tensorboard/ in the run directory")
    wandb: WandbConfig = Field(default_factory=WandbConfig)

    @property
    def names(self) -> tuple[str, ...]:
        """The trackers that are on."""
        return (*(["tensorboard"] if self.tensorboard else []), *(["wandb"] if self.wandb.project else []))
