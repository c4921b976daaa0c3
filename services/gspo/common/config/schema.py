"""The configuration of a run: every key with its type, default, bounds and meaning.

It holds no machine facts (ports chosen, paths found) and never rewrites a value: a contradiction is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator, model_validator

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.evaluation import BestFigure, EvaluationConfig, TrackingConfig
from gspo.common.config.fields import FIXED, FilePath, FreeMapping, RunName, Section
from gspo.common.config.learner import MICRO_BATCH_TOKENS, LearnerConfig
from gspo.common.config.reward import ENVIRONMENT_PART, EnvironmentConfig, RewardConfig
from gspo.common.config.services import ServicesConfig
from gspo.common.errors import NO_VALUE, ConfigError

Dtype = Literal["float32", "bfloat16", "float16"]


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


class SamplingConfig(Section):
    """How rollouts are sampled."""

    temperature: PositiveFloat = Field(
        1.0, description="Training and sampled evaluation; the learner's log-probs use it too"
    )
    top_p: float = Field(1.0, description="Off (1) for training: a cut distribution biases the ratio")
    top_k: int = Field(0, description="Off (0) for training")
    min_p: float = Field(0.0, description="Off (0) for training")
    stop: tuple[str, ...] = Field((), description="Strings that end an answer; their tokens are the policy's")

    @model_validator(mode="after")
    def _full_distribution(self) -> SamplingConfig:
        for key, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            value = getattr(self, key)
            if value != off and not (key == "top_k" and value == -1):
                raise self.wrong(
                    key,
                    "cuts the distribution, so the log-probs of generator and learner are not of the same policy and "
                    "the ratio is biased",
                    f"Leave it out, or set it to {off}",
                )
        return self


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
    max_attempts: PositiveInt = Field(3, description="Times a group is issued before it is given up")

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


class GenerationConfig(Section):
    """The vLLM engines."""

    may_change = True

    dtype: Dtype = Field("float32", description="Weights and arithmetic of generation")
    replicas: PositiveInt = Field(1, le=64, description="Generators that `gspo run` starts")
    on_update: Literal["recompute", "keep", "restart"] = Field(
        "recompute",
        description="In-flight rollouts at a weight update: recompute the KV cache, keep it (cheaper, drifts), or "
        "restart sampling",
        json_schema_extra=FIXED,
    )
    segment_tokens: PositiveInt | None = Field(
        None,
        description="Tokens that a rollout may sample in one step while tasks are queued; then it is paused until "
        "the next version. null: no limit",
    )
    save_tokens: PositiveInt = Field(512, description="Most tokens of a rollout that a generator's crash may cost")
    max_rollouts: PositiveInt = Field(256, description="In-flight rollouts of one engine (vLLM's max_num_seqs)")
    kv_cache_gb: PositiveFloat = Field(1.0, description="Memory of the KV cache on the CPU, in GiB")
    threads: int = Field(0, ge=0, description="CPU threads of one engine; 0 takes every core but one")
    push_timeout_s: PositiveFloat = Field(
        60.0,
        description="Least time limit of a weight push, and of the load in the engine. It grows with the policy's "
        "bytes and the time of earlier pushes",
    )
    engine: FreeMapping = Field(default_factory=dict, description="Further engine arguments, with vLLM's names")


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
