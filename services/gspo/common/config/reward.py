"""The section `reward`: the functions that score answers, their limits, and the registry of functions."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from gspo.common.config.fields import (
    HTTP_ADDRESS,
    ON_RESUME,
    FilePath,
    FreeMapping,
    RunName,
    Section,
    VersionText,
)
from gspo.common.errors import NO_VALUE, ConfigError

# Values of `reward.functions.N.builtin`; the reward service has a file or a client for each.
Builtin = Literal[
    "exact_match",
    "numeric",
    "math_equivalence",
    "regex",
    "json_schema",
    "code_tests",
    "length_penalty",
    "repetition_penalty",
    "reward_model",
    "llm_judge",
]


class RewardFunction(Section):
    """One function that scores answers: a file, a built-in, an HTTP address, or a name registered over REST."""

    path: FilePath | None = Field(
        None, description="Python file with `reward(prompts, completions, **columns)` or verl's `compute_score`"
    )
    builtin: Builtin | None = Field(None, description="A function that comes with gspo, instead of a file")
    url: str | None = Field(
        None,
        pattern=HTTP_ADDRESS,
        description="URL of your own scoring server, with OpenRLHF's remote protocol",
    )
    name: RunName | None = Field(
        None,
        description="Name in logs and metrics; default: of the file, built-in or host. Alone: a registered function",
    )
    version: VersionText | None = Field(
        None, description="Version of a registered function, or 8 or more of its first characters; default: active"
    )
    entry: str | None = Field(None, description="Name of the function, where the file holds more than one")
    args: FreeMapping = Field(
        default_factory=dict, description="Further keyword arguments of the function, such as a built-in's options"
    )
    weight: float = Field(1.0, description="Factor of this function's value in the summed reward")
    timeout_s: PositiveFloat | None = Field(None, description="Longest a call may take; reward.timeout_s by default")
    memory_mb: PositiveInt | None = Field(
        None, description="Address space of its process, in MiB; reward.memory_mb by default"
    )
    part_weights: dict[str, float] = Field(
        default_factory=dict, description="Factors of named parts of the value; default 1"
    )
    reads: tuple[FilePath, ...] = Field(
        (),
        description="Further files and folders that its code may read and import",
    )

    @property
    def label(self) -> str:
        """Name in tasks, scores, logs and metrics."""
        if self.name or self.builtin:
            return self.name or self.builtin or ""
        return self.path.stem if self.path else re.sub(r"[^A-Za-z0-9._-]", "-", urlsplit(self.url or "").netloc)

    @property
    def registered(self) -> bool:
        """Whether it is a name of the registry."""
        return self.path is None and self.builtin is None and self.url is None

    @model_validator(mode="after")
    def _is_one_thing(self) -> RewardFunction:
        kinds = [key for key in ("path", "builtin", "url") if getattr(self, key) is not None]
        if len(kinds) > 1:
            rule = f"stands beside {kinds[0]}, and a function is one of them"
            raise ConfigError(kinds[1], NO_VALUE, rule, "Leave one out")
        if not kinds and self.name is None:
            fix = "Set path, builtin, url, or the name of a registered function"
            raise ConfigError("path", NO_VALUE, "is missing", fix)
        if kinds and self.version is not None:
            rule = f"a function by {kinds[0]} has no registered version"
            raise ConfigError("version", NO_VALUE, rule, "Leave it out")
        if self.entry is not None and kinds != ["path"]:
            raise ConfigError("entry", NO_VALUE, "belongs to a file", "Leave it out, or set path")
        return self


class RegistryQuotas(Section):
    """Limits of the functions registered over REST. Beyond them, submissions are refused until versions are removed."""

    versions: PositiveInt = Field(1000, description="Versions of all names together", json_schema_extra=ON_RESUME)
    versions_per_name: PositiveInt = Field(200, description="Versions of one name", json_schema_extra=ON_RESUME)
    total_mb: PositiveInt = Field(
        128, description="Sources and test cases of all versions together, in MiB", json_schema_extra=ON_RESUME
    )
    name_mb: PositiveInt = Field(
        32, description="Sources and test cases of one name's versions, in MiB", json_schema_extra=ON_RESUME
    )


class RewardConfig(Section):
    """The reward of an answer."""

    functions: tuple[RewardFunction, ...] = Field(
        (),
        description="Reward functions, summed by weight; may be empty with an environment",
    )
    timeout_s: PositiveFloat = Field(
        10.0, description="Longest call; then its process is killed", json_schema_extra=ON_RESUME
    )
    memory_mb: PositiveInt = Field(
        2048,
        description="Address space of the process that runs user code, in MiB",
        json_schema_extra=ON_RESUME,
    )
    cpu_s: PositiveFloat | None = Field(
        None,
        description="Processor time of a call, over all its threads; null: timeout_s alone",
        json_schema_extra=ON_RESUME,
    )
    batch_size: PositiveInt = Field(
        64, description="Most answers in one call of a function", json_schema_extra=ON_RESUME
    )
    replicas: PositiveInt = Field(
        1,
        le=64,
        description="Reward services that `gspo run` starts; services.reward_port is that of the first",
        json_schema_extra=ON_RESUME,
    )
    workers: PositiveInt = Field(2, description="Parallel calls of one function", json_schema_extra=ON_RESUME)
    on_failure: Literal["rollout", "group"] = Field(
        "rollout",
        description="A failed score removes its rollout, or its whole group",
        json_schema_extra=ON_RESUME,
    )
    max_failure_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of failed scores above which the run is paused; 1: never",
        json_schema_extra=ON_RESUME,
    )
    failure_window: PositiveInt = Field(
        256, description="Training rollouts over which max_failure_share is measured", json_schema_extra=ON_RESUME
    )
    sandbox_minimum: Literal["bubblewrap", "landlock", "rlimits"] = Field(
        "landlock",
        description="Least confinement level of user code; the machine's strongest level is used",
        json_schema_extra=ON_RESUME,
    )
    registry: FilePath | None = Field(
        None,
        description="Folder of this machine's copy of registered functions; default: .rewards in run.directory",
        json_schema_extra=ON_RESUME,
    )
    allowed_packages: tuple[str, ...] = Field(
        ("numpy", "sympy", "math-verify", "regex", "rapidfuzz", "jsonschema"),
        description="Packages that a submitted function may import besides the standard library",
        json_schema_extra=ON_RESUME,
    )
    tokens: FilePath | None = Field(
        None,
        description="File of user tokens for REST: lines of NAME, ROLE (submit or read) and TOKEN",
        json_schema_extra=ON_RESUME,
    )
    calls_per_minute: PositiveInt = Field(
        600,
        description="Submissions, trials, activations or removals of one caller in a minute, each",
        json_schema_extra=ON_RESUME,
    )
    quotas: RegistryQuotas = Field(default_factory=RegistryQuotas)
