"""The sections `evaluation` and `tracking`: what is measured on held-out prompts, and where figures are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from gspo.common.config.fields import ON_RESUME, RunName, Section
from gspo.common.errors import in_yaml


class EvaluationConfig(Section):
    """Measuring the policy on prompts that are never trained on."""

    prompts: Path | dict[RunName, Path] | None = Field(
        None,
        description="Held-out prompts, in the form of data.prompts, or several files by name; none is no evaluation",
    )
    num_answers: PositiveInt = Field(
        4,
        description="Sampled answers to each prompt, at the training temperature",
        json_schema_extra=ON_RESUME,
    )
    greedy: bool = Field(
        True,
        description="One greedy answer to each prompt beside the sampled ones",
        json_schema_extra=ON_RESUME,
    )
    pass_reward: float = Field(
        1.0, description="An answer with at least this reward passes, in pass@k", json_schema_extra=ON_RESUME
    )
    every: int = Field(
        20,
        ge=0,
        description="Steps between evaluations while training; 0 is before and after only",
        json_schema_extra=ON_RESUME,
    )
    limit: PositiveInt | None = Field(
        None, description="Use only the first so many prompts of each file", json_schema_extra=ON_RESUME
    )
    limit_between: PositiveInt | None = Field(
        None,
        description="Use only the first so many prompts of each file between the first and the last evaluation",
        json_schema_extra=ON_RESUME,
    )
    hold_weights: bool = Field(
        True,
        description="Newer weights wait while an evaluation between two steps is under way, so that it is of one "
        "version; false does not hold training up, and tells the newest version that took part",
        json_schema_extra=ON_RESUME,
    )
    keep_best: str | None = Field(
        None,
        description="Keep the version with the highest such figure as best/ in the run directory: sampled_mean, "
        "greedy_mean, pass_at_K, best_at_K or part_FUNCTION_mean, of the first file or as FILE/FIGURE",
    )
    timeout_s: PositiveFloat = Field(
        1800.0,
        description="An evaluation of one file that takes longer is given up",
        json_schema_extra=ON_RESUME,
    )

    @field_validator("prompts", mode="before")
    @classmethod
    def _file_or_named_files(cls, given: Any) -> Any:
        if given is None or isinstance(given, str | Path) or (isinstance(given, dict) and given):
            return given
        raise ValueError(
            f"evaluation.prompts: {in_yaml(given)} is neither a file nor files by name. "
            "Write one path, or a line `name: path` for each file below the key"
        )

    @property
    def files(self) -> dict[str, Path]:
        """The files by name, in the user's order; a single one has an empty name. The first is the headline's."""
        if self.prompts is None:
            return {}
        return dict(self.prompts) if isinstance(self.prompts, dict) else {"": self.prompts}

    @property
    def pass_ks(self) -> tuple[int, ...]:
        """The k for which pass@k is reported: powers of two, and num_answers."""
        powers = {1 << exponent for exponent in range(self.num_answers.bit_length())}
        return tuple(sorted(powers | {self.num_answers}))

    @staticmethod
    def key_of(name: str) -> str:
        """The configuration key of a file."""
        return f"evaluation.prompts.{name}" if name else "evaluation.prompts"


class WandbConfig(Section):
    """Weights & Biases."""

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

    tensorboard: bool = Field(
        False, description="Write event files to tensorboard/ in the run directory", json_schema_extra=ON_RESUME
    )
    wandb: WandbConfig = Field(default_factory=WandbConfig)

    @property
    def names(self) -> tuple[str, ...]:
        """The trackers that are on."""
        return (*(["tensorboard"] if self.tensorboard else []), *(["wandb"] if self.wandb.project else []))
