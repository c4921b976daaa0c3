"""The configuration of a run: every key with its type, default, bounds and meaning.

It holds no machine facts (ports chosen, paths found) and never rewrites a value: a contradiction is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator, model_validator

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.engines import MICRO_BATCH_TOKENS, GenerationConfig, LearnerConfig, SamplingConfig
from gspo.common.config.evaluation import BestFigure, EvaluationConfig, TrackingConfig
from gspo.common.config.fields import FIXED, HTTP_HOST, FilePath, HostName, RunName, Section
from gspo.common.config.reward import ENVIRONMENT_PART, EnvironmentConfig, RewardConfig
from gspo.common.errors import NO_VALUE, ConfigError

Port = Annotated[int, Field(ge=0, le=65535)]


class ModelConfig(Section):
    """The policy that is trained."""

    path: str = Field(
        description="Folder of a Hugging Face model (config.json, safetensors, tokenizer), or its name on a hub"
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model")
    allow_pickle: bool = Field(False, description="Load .bin weights, which can run code, if there are no safetensors")

    @field_validator("path")
    @classmethod
    def _folder_beside_the_file(cls, path: str, info: ValidationInfo) -> str:
        """A hub's name may look like a path: a folder that exists beside the file is meant."""
        folder = info.context["base"] / path if info.context else None
        return str(folder) if folder is not None and folder.exists() else path


class DataConfig(Section):
    """The prompts."""

    prompts: FilePath = Field(
        description="Training prompts: JSONL, JSON, CSV, Parquet, or a folder that `datasets` opens"
    )
    prompt_column: str = Field("prompt", description="Column with the prompt: text, or a list of chat messages")
    on_long_prompt: Literal["error", "skip", "truncate"] = Field(
        "error", description="Action for a prompt longer than algorithm.prompt_length; truncate keeps its end"
    )
    shuffle: bool = Field(True, description="Shuffle every pass over the prompts, each differently, from the seed")


class StalenessConfig(Section):
    """How far generation may run ahead of the learner."""

    may_change = True

    max_lag: int = Field(1, ge=0, le=64, description="Versions a trained rollout may be behind; 0 is synchronous")
    on_stale: Literal["wait", "drop", "mask"] = Field(
        "wait", description="Before an open group becomes too old: wait for it, drop it, or mask its old tokens"
    )
    max_token_age: PositiveInt | None = Field(
        None, description="Versions a token may be behind under on_stale: mask; max_lag by default"
    )
    group_deadline_s: PositiveFloat = Field(600.0, description="An open group older than this is issued again")
    max_attempts: PositiveInt = Field(
        3,
        description="Times a group is issued before it is given up; also how often its task is handed out without "
        "progress",
    )

    @model_validator(mode="after")
    def _mask_has_an_age(self) -> StalenessConfig:
        if self.max_token_age is not None and self.on_stale != "mask":
            raise self.wrong(
                "max_token_age",
                f"has no effect under on_stale: {self.on_stale}",
                "Set on_stale: mask, or leave max_token_age out",
            )
        return self

    @property
    def token_age_limit(self) -> int:
        """Versions that a counted token may be behind."""
        return self.max_lag if self.max_token_age is None else self.max_token_age


class RunConfig(Section):
    """Length, checkpoints, disk."""

    may_change = True

    directory: FilePath = Field(
        Path("runs"),
        validate_default=True,
        description="Folder that holds the run directories",
        json_schema_extra=FIXED,
    )
    total_steps: PositiveInt | None = Field(None, description="Stop after so many steps")
    total_epochs: PositiveFloat | None = Field(None, description="Stop after so many passes over the prompts")
    total_hours: PositiveFloat | None = Field(None, description="Stop after so many hours of training")
    checkpoint_every: PositiveInt = Field(50, description="Steps between checkpoints")
    keep_checkpoints: PositiveInt = Field(2, description="Checkpoints kept")
    keep_log_steps: PositiveInt | None = Field(
        None, description="Number of kept step files; default: all. Files that a kept checkpoint needs always stay"
    )
    start_timeout_s: PositiveFloat = Field(600.0, description="Longest that services may take to become ready")
    drain_timeout_s: PositiveFloat = Field(
        60.0, description="Longest wait of Ctrl-C for the current step and a checkpoint"
    )


class TlsConfig(Section):
    """Certificates of the services: with them HTTP and gRPC speak TLS."""

    may_change = True

    cert: FilePath | None = Field(
        None, description="Certificate of every service, in PEM, with its chain; it enables TLS"
    )
    key: FilePath | None = Field(None, description="The certificate's private key, in PEM, without a passphrase")
    ca: FilePath | None = Field(
        None, description="Certificates of the authorities of services and Redis; default: those of the machine"
    )
    server_name: str | None = Field(
        None, description="Name in the services' certificate, checked instead of the host name"
    )

    @property
    def is_on(self) -> bool:
        """Whether the services speak TLS."""
        return self.cert is not None

    @model_validator(mode="after")
    def _is_whole(self) -> TlsConfig:
        for key, other in (("cert", "key"), ("key", "cert"), ("server_name", "cert")):
            if getattr(self, key) is not None and getattr(self, other) is None:
                raise ConfigError(key, NO_VALUE, f"is of no use without services.tls.{other}", "Set both, or neither")
        return self


class ServicesConfig(Section):
    """Addresses and credentials of the services."""

    may_change = True

    host: str = Field(
        "127.0.0.1",
        description="Address of every service and of the run's own Redis. Beyond loopback, token_file and "
        "redis_password_file are required",
    )
    redis_url: str | None = Field(None, description="URL of Redis, rediss:// for TLS; null: the run starts its own")
    redis_password_file: FilePath | None = Field(
        None, description="File with Redis's password; one on another machine must have it"
    )
    coordinator_port: Port = Field(0, description="Run state and control over REST; 0 picks a free port")
    reward_port: Port = Field(0, description="Reward functions over REST; 0 picks a free port")
    http_hosts: tuple[HostName, ...] = Field(
        (),
        description="Host names that HTTP requests may use, such as *.example.org; localhost, this machine's name "
        "and IP addresses always work",
    )
    token_file: FilePath | None = Field(None, description="File with the token that services show each other")
    lease_s: PositiveFloat = Field(30.0, description="A service silent for so long loses its work to another")
    otlp_endpoint: str | None = Field(
        None, pattern=HTTP_HOST, description="Collector of traces by OTLP over gRPC, such as http://127.0.0.1:4317"
    )
    max_restarts: int = Field(5, ge=0, description="Restarts of a crashing service before the run ends")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level of log lines written"
    )
    tls: TlsConfig = Field(default_factory=TlsConfig)

    @model_validator(mode="after")
    def _no_password_in_the_open(self) -> ServicesConfig:
        if self.redis_url is not None and urlsplit(self.redis_url).password is not None:
            raise ConfigError(
                "redis_url",
                NO_VALUE,
                "holds a password, which the run directory and its logs would keep",
                "Leave it out there, write it into a file and name that in services.redis_password_file",
            )
        return self


class Config(Section):
    """Everything a user says about a run."""

    name: RunName = Field(description="Name of the run: its directory and its keys in Redis")
    seed: int = Field(0, ge=0, lt=2**31, description="Prompt order, sampling, permutations, initial random state")
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = Field(default_factory=RewardConfig)
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    staleness: StalenessConfig = Field(default_factory=StalenessConfig)
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    run: RunConfig = Field(default_factory=RunConfig)
    services: ServicesConfig = Field(default_factory=ServicesConfig)

    @model_validator(mode="after")
    def _ends(self) -> Config:
        run = self.run
        if run.total_steps is None and run.total_epochs is None and run.total_hours is None:
            raise ConfigError(
                "run.total_steps",
                NO_VALUE,
                "the run has no end",
                "Set run.total_steps, run.total_epochs or run.total_hours",
            )
        return self

    @model_validator(mode="after")
    def _something_rewards(self) -> Config:
        if not self.reward.functions and not self.environment.used:
            raise ConfigError(
                "reward.functions",
                NO_VALUE,
                "is empty, and there is no environment that rewards",
                "List a reward function, or set environment.path",
            )
        for index, function in enumerate(self.reward.functions if self.environment.used else ()):
            if function.label in (ENVIRONMENT_PART, self.environment.label):
                raise ConfigError(
                    f"reward.functions.{index}.name",
                    NO_VALUE,
                    f"'{function.label}' is the environment's name in scores and logs",
                    "Give the function another with `name:`",
                )
        return self

    @model_validator(mode="after")
    def _schedule_has_a_length(self) -> Config:
        if self.learner.schedule != "constant" and self.run.total_steps is None:
            raise self.wrong(
                "learner.schedule", "needs a known number of steps", "Set run.total_steps, or schedule: constant"
            )
        return self

    @model_validator(mode="after")
    def _offload_fits_the_stage(self) -> Config:
        learner = self.learner
        least = {"none": 0, "optimizer": 1, "all": 3}[learner.offload]
        if learner.zero_stage < least:
            raise self.wrong(
                "learner.offload",
                f"needs zero_stage {least}{' or more' if least < 3 else ''}, and it is {learner.zero_stage}",
                f"Set learner.zero_stage: {least}, or offload: none",
            )
        return self

    @model_validator(mode="after")
    def _segments_fit_the_lag(self) -> Config:
        segment, staleness = self.generation.segment_tokens, self.staleness
        if segment is None:
            return self
        key, longest = "generation.segment_tokens", self.algorithm.response_length
        num_segments = -(-longest // segment)
        if staleness.max_lag == 0:
            raise self.wrong(
                key,
                "pauses answers until a later step, and with staleness.max_lag 0 no later step may train on them",
                "Leave it out, or raise max_lag",
            )
        if self.generation.on_update == "restart":
            raise self.wrong(
                key,
                "continues answers under newer weights, and generation.on_update: restart drops the tokens of older "
                "ones",
                "Leave one of them out",
            )
        if staleness.on_stale != "mask" and staleness.max_lag < num_segments:
            raise self.wrong(
                key,
                f"spreads the longest answer (algorithm.response_length {longest}) over {num_segments} steps, and "
                f"under staleness.on_stale: {staleness.on_stale} max_lag {staleness.max_lag} is too small for its "
                "first tokens",
                f"Set staleness.max_lag: {num_segments} or more, on_stale: mask, or longer segments",
            )
        return self

    @model_validator(mode="after")
    def _best_is_measured(self) -> Config:
        _ = self.best_figure
        return self

    @property
    def best_figure(self) -> BestFigure | None:
        """The figure that evaluation.keep_best names; None where it is not set."""
        labels = [function.label for function in self.reward.functions]
        return self.evaluation.best_figure([*labels, *([ENVIRONMENT_PART] if self.environment.used else [])])

    def is_measured(self, step: int) -> bool:
        """Whether the version of a step is measured during training; the last version is measured at the end."""
        every = self.evaluation.every
        return bool(self.evaluation.files and every) and step % every == 0 and 0 < step != self.run.total_steps

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.run.directory / self.name

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens in one forward and backward of the learner."""
        longest = self.algorithm.prompt_length + self.algorithm.response_length
        return self.learner.micro_batch_tokens or max(MICRO_BATCH_TOKENS, longest)

    @property
    def registry_dir(self) -> Path:
        """This machine's copy of the registered functions; no run can have its name."""
        return self.reward.registry or self.run.directory / ".rewards"

    @property
    def num_slots(self) -> int:
        """Groups that may be open at a time."""
        return (self.staleness.max_lag + 1) * self.algorithm.rollout_batch_size
