"""The section `data`: one source of prompts, or several with weights, each with its reward and its environment.

A run of one source is a list of one, whose reward and environment are the sections `reward` and `environment`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveFloat, field_validator

from gspo.common.chat_messages import RESERVED_VARIABLES
from gspo.common.config.engines import StopString, Temperature
from gspo.common.config.fields import ON_RESUME, ColumnType, FilePaths, FreeMapping, Owner, RunName, Section
from gspo.common.config.gateway import AGENT_PART
from gspo.common.config.reward import ENVIRONMENT_PART, EnvironmentConfig, RewardFunction
from gspo.common.errors import NO_VALUE, ConfigError, InputError, in_yaml

if TYPE_CHECKING:
    from gspo.common.config.schema import Config

# Each source has its own figures: metrics with its name as a label, and curves in the report.
MOST_SOURCES = 32
# Keys that travel in each task. The others say which code is loaded, once for all sources that name it.
_IN_TASKS = {
    RewardFunction: {"weight", "part_weights"},
    EnvironmentConfig: {"weight", "tools", "tool_format", "max_turns", "turn_tokens", "long_turn", "total_timeout_s"},
}
CodeSpec = RewardFunction | EnvironmentConfig
# Values that a source may have for itself -> the key of the value for all sources.
_SHARED = {
    **{name: f"data.{name}" for name in ("prompts", "prompt_column", "answer_column", "types", "chat_template_kwargs")},
    "functions": "reward.functions",
    "environment": "environment",
    "stop": "sampling.stop",
    "temperature": "sampling.temperature",
}


def _unless_replaced(name: str) -> tuple[Owner, ...]:
    """The owner of a value for all sources, which has no effect where each has its own."""

    def is_there(config: Config) -> bool:
        return not config.data.sources or any(getattr(source, name) is None for source in config.data.sources)

    return (Owner(f"data.sources that all have their own {name}", is_there, is_rival=True),)


SHARED_BY_SOURCES = {key: _unless_replaced(name) for name, key in _SHARED.items() if name != "prompts"}


def _known_to_templates(variables: dict[str, Any]) -> dict[str, Any]:
    """Refuse variables that are not the template's to read."""
    for name, value in variables.items():
        if name == "tools":
            fix = "Set environment.tools, or have a column of this name"
            raise ConfigError(name, value, "are not the same in every prompt", fix)
        if name in RESERVED_VARIABLES:
            raise ConfigError(name, value, "belongs to the call of the template", "Leave it out: gspo sets it")
    return variables


TemplateVariables = Annotated[FreeMapping, AfterValidator(_known_to_templates)]


class SourceConfig(Section):
    """One of several sources of prompts. A key without a value has that of the section which it names."""

    name: RunName = Field(description="Name in the log, in metrics and in evaluation.prompts")
    prompts: FilePaths = Field(description="Training prompts, as data.prompts")
    weight: PositiveFloat = Field(1.0, description="Share of the groups, relative to the weights of the other sources")
    prompt_column: str | None = Field(None, description="Column with the prompt; data.prompt_column by default")
    answer_column: str | None = Field(None, description="Column with the right answer; data.answer_column by default")
    types: dict[str, ColumnType] | None = Field(None, description="Types of its columns; data.types by default")
    chat_template_kwargs: TemplateVariables | None = Field(
        None, description="Variables of the chat template; data.chat_template_kwargs by default"
    )
    functions: tuple[RewardFunction, ...] | None = Field(
        None, description="Reward functions of its answers; reward.functions by default, [] for none"
    )
    environment: EnvironmentConfig | None = Field(
        None, description="Environment of its conversations; the section environment by default, {} for none"
    )
    stop: tuple[StopString, ...] | None = Field(
        None, description="Strings that end its answers; sampling.stop by default"
    )
    temperature: Temperature | None = Field(
        None, description="Temperature of its answers, and of the learner's log-probs; sampling.temperature by default"
    )


_CURRICULUM = Owner("data.curriculum: spread", lambda data: data.curriculum != "none")


class DataConfig(Section):
    """The prompts."""

    KINDS = ("prompts", "sources")
    prompts: FilePaths | None = Field(
        None,
        description="Training prompts: JSONL, JSON, CSV, Parquet, or a folder that `datasets` opens; or a list of "
        "them. Required without data.sources",
    )
    sources: tuple[SourceConfig, ...] = Field(
        (), max_length=MOST_SOURCES, description="Several sources of prompts with weights, in place of data.prompts"
    )
    prompt_column: str = Field("prompt", description="Column with the prompt: text, or a list of chat messages")
    answer_column: str | None = Field(
        None,
        description="Column with the right answer, which functions get as ground_truth; default: ground_truth, "
        "reward_model.ground_truth or answer",
    )
    types: dict[str, ColumnType] = Field(
        {},
        description="Types of columns by their names, for example of numbers in CSV: text, number, boolean, json, "
        "base64 (bytes as text), or omit",
    )
    chat_template_kwargs: TemplateVariables = Field(
        default_factory=dict,
        description="Variables of the chat template in every prompt, such as enable_thinking; a column of this name "
        "has those of its row",
    )
    changed_files: Literal["refuse", "accept"] = Field(
        "refuse",
        description="A resume whose data files have other contents than at the last start: refuse it, or accept it "
        "with a note in the report",
        json_schema_extra=ON_RESUME,
    )
    on_long_prompt: Literal["error", "skip", "truncate"] = Field(
        "error", description="Action for a prompt longer than algorithm.prompt_length; truncate keeps its end"
    )
    on_assistant_end: Literal["continue", "error"] = Field(
        "continue",
        description="Action for a prompt whose last message is the assistant's: the policy continues that message, or "
        "an error",
    )
    shuffle: bool = Field(True, description="Shuffle every pass over the prompts, each differently, from the seed")
    curriculum: Literal["none", "spread"] = Field(
        "none",
        description="spread: a prompt whose last known group had equal rewards sits out all but one in revisit_passes "
        "passes over the prompts",
    )
    revisit_passes: Annotated[int, _CURRICULUM] = Field(
        4, ge=2, le=1000, description="Under curriculum: spread, every prompt is in one of so many passes at least"
    )

    @field_validator("sources")
    @classmethod
    def _have_their_own_names(cls, sources: tuple[SourceConfig, ...]) -> tuple[SourceConfig, ...]:
        names = [source.name for source in sources]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ConfigError(f"{index}.name", name, "names two sources", "Give each a name of its own")
        return sources

    def problems(self) -> Iterator[ConfigError]:
        if not self.used:
            description = type(self).model_fields["prompts"].description
            yield ConfigError("prompts", NO_VALUE, "is missing", f"Set it: {description}")


@dataclass(frozen=True)
class Source:
    """A source of prompts with all that is its own.

    Attributes:
        name: Empty where data.prompts is the only source.
        weight: Share of the groups, relative to the other sources.
        agent_weight: Factor of the reward that the run's agent returns; None where it returns none.
        types: Column -> type, of columns that are read otherwise than the files have them.
        chat_template_kwargs: Variables of the chat template in every prompt.
        answer_column: The column with the right answer; None where a rule finds it.
        own: The names of its own values -> their keys; other values are those of all sources.
    """

    name: str = ""
    prompts: tuple[Path, ...] = ()
    weight: float = 1.0
    prompt_column: str = "prompt"
    answer_column: str | None = None
    types: Mapping[str, ColumnType] = field(default_factory=dict)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    functions: tuple[RewardFunction, ...] = ()
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    stop: tuple[str, ...] = ()
    temperature: float = 1.0
    agent_weight: float | None = None
    own: Mapping[str, str] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """The key that has a value of this source, such as its `prompts`, for messages."""
        return self.own.get(name, _SHARED[name])

    @property
    def part_labels(self) -> list[str]:
        """Names of the parts of its score, as its rollouts have them."""
        return [
            *(function.label for function in self.functions),
            *([ENVIRONMENT_PART] if self.environment.used else []),
            *([AGENT_PART] if self.agent_weight is not None else []),
        ]

    def code(self) -> Iterator[tuple[str, CodeSpec]]:
        """Its functions and its environment, by their places in the configuration; no environment on a server."""
        for index, function in enumerate(self.functions):
            yield f"{self.key('functions')}.{index}", function
        if self.environment.used and not self.environment.on_server:
            yield self.key("environment"), self.environment


def sources_of(config: Config) -> tuple[Source, ...]:
    """The sources of a run, in the order of the configuration; one without a name for data.prompts."""
    data = config.data
    only = Source(
        prompts=_files(data.prompts),
        prompt_column=data.prompt_column,
        answer_column=data.answer_column,
        types=data.types,
        chat_template_kwargs=data.chat_template_kwargs,
        functions=config.reward.functions,
        environment=config.environment,
        stop=config.sampling.stop,
        temperature=config.sampling.temperature,
        agent_weight=config.agent.weight if config.agent.used else None,
    )
    return tuple(_of_list(index, own, only) for index, own in enumerate(data.sources)) or (only,)


def _of_list(index: int, own: SourceConfig, shared: Source) -> Source:
    """One of data.sources, with the values of other sections for those that it leaves out."""
    changes = {name: getattr(own, name) for name in _SHARED if getattr(own, name) is not None}
    keys = {name: f"data.sources.{index}.{name}" for name in changes}
    return replace(shared, **{**changes, "prompts": _files(own.prompts)}, name=own.name, weight=own.weight, own=keys)


def _files(prompts: Path | tuple[Path, ...] | None) -> tuple[Path, ...]:
    return (prompts,) if isinstance(prompts, Path) else prompts or ()


def check_sources(config: Config) -> None:
    """Refuse sources that cannot be rewarded, and keys that have no effect or no meaning with them.

    Raises:
        ConfigError: Names the key.
    """
    needs_rewards = not config.teacher.alone or bool(config.evaluation.files)
    for source in config.sources:
        _check_rewards(source, is_needed=needs_rewards)
    remote_environments(config.sources)
    if config.data.curriculum != "none":
        _check_curriculum(config)
    if len(config.data.sources) > 1:
        _check_several(config)


def _check_rewards(source: Source, *, is_needed: bool) -> None:
    environment_rewards = source.environment.kind not in ("", "mcp")
    is_rewarded = source.functions or environment_rewards or source.agent_weight is not None
    if is_needed and not is_rewarded:
        of_it = f" for source '{source.name}'" if source.name else ""
        raise ConfigError(
            source.key("functions"),
            NO_VALUE,
            f"is empty{of_it}, and there is no environment or agent that rewards",
            f"List a reward function, or set {source.key('environment')}.path; training needs none under "
            "teacher.alone: true, and an evaluation does",
        )
    for index, function in enumerate(source.functions if source.environment.used else ()):
        if function.label in (ENVIRONMENT_PART, source.environment.label):
            raise ConfigError(
                f"{source.key('functions')}.{index}.name",
                NO_VALUE,
                f"'{function.label}' is the environment's name in scores and logs",
                "Give the function another with `name:`",
            )


def _check_curriculum(config: Config) -> None:
    """Refuse a curriculum where passes are counted, or where a group with equal rewards teaches too."""
    key, value, leave_out = "data.curriculum", config.data.curriculum, "Set data.curriculum: none"
    if config.run.total_epochs is not None:
        raise ConfigError(
            "run.total_epochs",
            config.run.total_epochs,
            f"counts passes over the prompts, and under {key}: {value} a pass leaves prompts out",
            f"Set run.total_steps or run.total_hours, or {key}: none",
        )
    if config.teacher.alone:
        rule = "follows the rewards, which have no part in the training under teacher.alone: true"
        raise ConfigError(key, value, rule, leave_out)
    if config.algorithm.reward_norm not in ("group", "leave_one_out"):
        raise ConfigError(
            key,
            value,
            "avoids groups with equal rewards, and under algorithm.reward_norm: "
            f"{in_yaml(config.algorithm.reward_norm)} these teach too",
            f"{leave_out}, or reward_norm: group or leave_one_out",
        )


def _check_several(config: Config) -> None:
    if config.algorithm.reward_norm in ("batch", "running"):
        raise ConfigError(
            "algorithm.reward_norm",
            config.algorithm.reward_norm,
            "would mix the rewards of all sources, which may have different scales, in one mean",
            "Set group or leave_one_out, which compare the answers to one prompt, or null",
        )
    names = [source.name for source in config.data.sources]
    for file in config.evaluation.files:
        if file not in names:
            raise ConfigError(
                config.evaluation.key_of(file),
                NO_VALUE,
                "is of no source, and each held-out file is scored as the source of its name",
                f"Give each file the name of a source: {', '.join(names)}",
            )


def remote_environments(sources: Sequence[Source]) -> dict[str, tuple[str, EnvironmentConfig]]:
    """The environments on servers by their names in tasks, each with its place in the configuration.

    Raises:
        ConfigError: One name stands for two environments.
    """
    remotes: dict[str, tuple[str, EnvironmentConfig]] = {}
    for source in sorted(sources, key=lambda source: not source.environment.on_server):
        key, environment = source.key("environment"), source.environment
        if environment.on_server:
            remotes.setdefault(environment.label, (key, environment))
        if environment.label in remotes and _loaded(remotes[environment.label][1]) != _loaded(environment):
            rule = f"'{environment.label}' names two environments"
            raise ConfigError(f"{key}.name", NO_VALUE, rule, "Give each a name of its own with `name:`")
    return remotes


def code_of(sources: Iterable[Source]) -> dict[str, CodeSpec]:
    """The functions and environments that the reward service loads, by their keys: each name once.

    Raises:
        InputError: One name stands for two functions or environments.
    """
    specs: dict[str, CodeSpec] = {}
    by_label: dict[str, tuple[str, CodeSpec]] = {}
    for source in sources:
        own: set[str] = set()
        for key, spec in source.code():
            first_key, first = by_label.setdefault(spec.label, (key, spec))
            if spec.label in own or (first_key != key and _loaded(first) != _loaded(spec)):
                kinds = (
                    "functions" if isinstance(spec, RewardFunction) and isinstance(first, RewardFunction) else "things"
                )
                raise InputError(
                    f"{key}.name",
                    f"'{spec.label}' names two {kinds}",
                    "Give each a name of its own with `name:`",
                )
            own.add(spec.label)
            specs.setdefault(first_key, first)
    return specs


def _loaded(spec: CodeSpec) -> tuple[type, dict[str, object]]:
    """The parts of a function or an environment that do not travel in its tasks."""
    return type(spec), spec.model_dump(exclude=_IN_TASKS[type(spec)])
