"""The configuration of a run: every key with its type, default, bounds and meaning.

It holds no machine facts (ports chosen, paths found) and never rewrites a value: a contradiction is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.engines import (
    MICRO_BATCH_TOKENS,
    SPREAD_STAGE,
    GenerationConfig,
    LearnerConfig,
    SamplingConfig,
)
from gspo.common.config.evaluation import BestFigure, EvaluationConfig, RulesConfig, TrackingConfig
from gspo.common.config.fields import (
    FIXED,
    HTTP_HOST,
    ON_RESUME,
    FilePath,
    HostName,
    ModelPath,
    Owner,
    RunName,
    Section,
    no_password,
)
from gspo.common.config.gateway import AgentConfig, GatewayConfig
from gspo.common.config.reward import EnvironmentConfig, RewardConfig
from gspo.common.config.sources import SHARED_BY_SOURCES, DataConfig, Source, check_sources, sources_of
from gspo.common.config.teacher import BESIDE_TEACHER, TeacherConfig
from gspo.common.errors import NO_VALUE, ConfigError

Port = Annotated[int, Field(ge=0, le=65535)]


class ModelConfig(Section):
    """The policy that is trained."""

    path: ModelPath = Field(
        description="Folder of a Hugging Face model (config.json, safetensors, tokenizer), or its name on a hub"
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model")
    allow_pickle: bool = Field(False, description="Load .bin weights, which can run code, if there are no safetensors")


_MASKS = Owner("staleness.on_stale: mask", lambda staleness: staleness.on_stale == "mask")


class StalenessConfig(Section):
    """How far generation may run ahead of the learner."""

    may_change = True

    max_lag: int = Field(1, ge=0, le=64, description="Versions a trained rollout may be behind; 0 is synchronous")
    on_stale: Literal["wait", "drop", "mask"] = Field(
        "wait", description="Before an open group becomes too old: wait for it, drop it, or mask its old tokens"
    )
    max_token_age: Annotated[PositiveInt | None, _MASKS] = Field(
        None, description="Versions a token may be behind under on_stale: mask; max_lag by default"
    )
    group_deadline_s: PositiveFloat = Field(600.0, description="An open group older than this is issued again")
    max_attempts: PositiveInt = Field(
        3,
        description="Times a group is issued before it is given up; also how often its task is handed out without "
        "progress",
    )

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
    total_epochs: PositiveFloat | None = Field(
        None,
        description="Stop after so many passes over the prompts; a pass over several sources is as many groups as they "
        "have prompts together",
    )
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


_CERT = Owner("services.tls.cert", lambda tls: tls.cert is not None)
_KEY = Owner("services.tls.key", lambda tls: tls.key is not None)


class TlsConfig(Section):
    """Certificates of the services: with them HTTP and gRPC speak TLS."""

    may_change = True

    cert: Annotated[FilePath | None, _KEY] = Field(
        None, description="Certificate of every service, in PEM, with its chain; it enables TLS"
    )
    key: Annotated[FilePath | None, _CERT] = Field(
        None, description="The certificate's private key, in PEM, without a passphrase"
    )
    ca: FilePath | None = Field(
        None, description="Certificates of the authorities of services and Redis; default: those of the machine"
    )
    server_name: Annotated[str | None, _CERT] = Field(
        None, description="Name in the services' certificate, checked instead of the host name"
    )

    @property
    def is_on(self) -> bool:
        """Whether the services speak TLS."""
        return self.cert is not None


class ServicesConfig(Section):
    """Addresses and credentials of the services."""

    may_change = True

    host: str = Field(
        "127.0.0.1",
        description="Address of every service and of the run's own Redis. Beyond loopback, token_file and "
        "redis_password_file are required",
    )
    redis_url: Annotated[str, no_password("services.redis_password_file")] | None = Field(
        None, description="URL of Redis, rediss:// for TLS; null: the run starts its own"
    )
    redis_password_file: FilePath | None = Field(
        None, description="File with Redis's password; one on another machine must have it"
    )
    coordinator_port: Port = Field(0, description="Run state and control over REST; 0 picks a free port")
    reward_port: Port = Field(0, description="Reward functions over REST; 0 picks a free port")
    gateway_port: Port = Field(0, description="APIs of OpenAI and Anthropic; 0 picks a free port")
    http_hosts: tuple[HostName, ...] = Field(
        (),
        description="Host names that HTTP requests may use, such as *.example.org; localhost, this machine's name "
        "and IP addresses always work",
    )
    http_connections: int = Field(
        512,
        ge=4,
        le=60_000,
        description="Connections of each HTTP server at a time. One address may have half of them: raise it for more "
        "agents behind a proxy",
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


_GATEWAY = Owner("gateway.replicas: 1", lambda config: config.gateway.replicas > 0)
_AGENT = Owner("agent.path, agent.command, or agent.external: true", lambda config: config.agent.used)
_LAG = Owner("staleness.max_lag of at least 1", lambda config: config.staleness.max_lag > 0)
_SPLIT = Owner(
    "several clipped updates a step, by algorithm.num_mini_batches or ppo_epochs",
    lambda config: config.algorithm.clips_sequences and config.algorithm.updates_per_step > 1,
)
_NO_AGENT = Owner("an agent, whose requests run to their ends", lambda config: not config.agent.used, is_rival=True)
_OWN_SAMPLING = Owner(
    "agent.sampling: client, under which requests choose it",
    lambda config: config.agent.sampling != "client",
    is_rival=True,
)


class Config(Section):
    """Everything a user says about a run."""

    OWNED: ClassVar[Mapping[str, tuple[Owner, ...]]] = {
        **BESIDE_TEACHER,
        **SHARED_BY_SOURCES,
        "services.gateway_port": (_GATEWAY,),
        "algorithm.ratio_of": (_AGENT, *BESIDE_TEACHER["algorithm.ratio_of"]),
        "algorithm.rollout_length": (_AGENT,),
        "learner.mismatch_every": (_LAG,),
        "learner.clip_split_every": (_SPLIT,),
        "generation.segment_tokens": (_NO_AGENT,),
        "evaluation.temperature": (_OWN_SAMPLING,),
        "evaluation.top_p": (_OWN_SAMPLING,),
    }
    name: RunName = Field(description="Name of the run: its directory and its keys in Redis")
    seed: int = Field(0, ge=0, lt=2**31, description="Prompt order, sampling, permutations, initial random state")
    placement: Literal["split", "shared"] = Field(
        "split",
        description="GPUs of generators and learner: each their own (split, where there are enough), or the same ones "
        "in shifts (shared, with staleness.max_lag 0). shared has never run on a GPU",
        json_schema_extra=ON_RESUME,
    )
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = Field(default_factory=RewardConfig)
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    staleness: StalenessConfig = Field(default_factory=StalenessConfig)
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    agent: AgentConfig = Field(default_factory=AgentConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    rules: RulesConfig = Field(default_factory=RulesConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    run: RunConfig = Field(default_factory=RunConfig)
    services: ServicesConfig = Field(default_factory=ServicesConfig)

    def problems(self) -> Iterator[ConfigError]:
        return chain(
            self._agent_problems(),
            self._source_problems(),
            self._update_problems(),
            self._segment_problems(),
            self._placement_problems(),
        )

    def _agent_problems(self) -> Iterator[ConfigError]:
        if not self.agent.used:
            return
        if not self.gateway.replicas:
            yield ConfigError(
                "gateway.replicas",
                0,
                "starts no gateway, and agents call the policy through one",
                "Set gateway.replicas: 1, or leave the section agent out",
            )
        if any(source.environment.used for source in self.sources):
            yield ConfigError(
                "environment",
                NO_VALUE,
                "stands beside an agent, and rollouts are played by one",
                "Leave one of them out",
            )
        for source in self.sources:
            if source.stop:
                rule = "has no effect with an agent, which names stop strings in its requests"
                yield ConfigError(source.key("stop"), list(source.stop), rule, "Leave it out")
        if self.agent.timeout_s > self.staleness.group_deadline_s:
            yield self.wrong(
                "agent.timeout_s",
                f"is longer than staleness.group_deadline_s {self.staleness.group_deadline_s:g}, after which its group "
                "is issued again",
                "Lower it, or raise the deadline",
            )

    def _source_problems(self) -> Iterator[ConfigError]:
        run = self.run
        if run.total_steps is None and run.total_epochs is None and run.total_hours is None:
            yield ConfigError(
                "run.total_steps",
                NO_VALUE,
                "the run has no end",
                "Set run.total_steps, run.total_epochs or run.total_hours",
            )
        for source in self.sources:
            self.teacher.check_temperature(source.temperature, source.key("temperature"))
        if self.teacher.address is not None and self.agent.sampling == "client":
            yield self.wrong(
                "agent.sampling",
                "lets agents choose temperatures, and the log-probs of teacher.address are those of temperature 1",
                "Leave it out, or set teacher.path in place of teacher.address",
            )
        check_sources(self)
        if not self.sampling.cuts:
            return
        rule = fix = ""
        if self.teacher.address is not None:
            rule = "needs log-probs over the tokens that it keeps, and a server (teacher.address) gives those over all"
            fix = "Set teacher.path in place of teacher.address, or top_k: 0"
        elif self.generation.draft_tokens:
            rule = "ends vLLM's process at a step without drafts (generation.draft_tokens)"
            fix = "Leave one of them out"
        elif self.agent.sampling == "client":
            rule = "has no effect under agent.sampling: client, where the requests' own sampling counts"
            fix = "Leave it out, or set agent.sampling: run"
        if rule:
            yield ConfigError("sampling.top_k", self.sampling.top_k, rule, fix)

    def _update_problems(self) -> Iterator[ConfigError]:
        has_turns = self.agent.used or any(source.environment.used for source in self.sources)
        if self.algorithm.weighs_turns and not has_turns:
            same = "seq-mean-token-mean" if self.algorithm.averages_turns else "token-mean"
            yield self.wrong(
                "algorithm.loss_agg_mode",
                "divides a conversation by its turns, and without an environment or agent every answer is one turn",
                f"Set {same}, which is then the same, or an environment",
            )
        if self.generation.draft_tokens and self.evaluation.top_p not in (None, 1.0):
            yield self.wrong(
                "evaluation.top_p",
                "cuts the distribution, and drafts (generation.draft_tokens) are checked against the whole one",
                "Leave one of them out",
            )
        if self.learner.schedule != "constant" and self.run.total_steps is None:
            yield self.wrong(
                "learner.schedule", "needs a known number of steps", "Set run.total_steps, or schedule: constant"
            )
        moves = self.algorithm.updates_per_step > 1 or self.learner.lora.dropout > 0 or self.learner.model_dropout
        if self.algorithm.routing_replay == "learner" and not moves:
            yield self.wrong(
                "algorithm.routing_replay",
                "has no effect with one update a step (num_mini_batches: 1, ppo_epochs: 1): its pass has the weights "
                "of the old log-probs, and so their experts",
                "Set it to none, or raise algorithm.num_mini_batches",
            )
        learner = self.learner
        least = {"none": 0, "optimizer": 1, "all": 3}[learner.offload]
        if learner.zero_stage < least:
            yield self.wrong(
                "learner.offload",
                f"needs zero_stage {least}{' or more' if least < 3 else ''}, and it is {learner.zero_stage}",
                f"Set learner.zero_stage: {least}, or offload: none",
            )
        if self.learner.torch_compile and self.learner.zero_stage == SPREAD_STAGE:
            yield self.wrong(
                "learner.torch_compile",
                "needs whole weights, and zero_stage 3 gathers them within each layer",
                "Leave it out, or set learner.zero_stage to 2 or less",
            )

    def _segment_problems(self) -> Iterator[ConfigError]:
        segment, staleness = self.generation.segment_tokens, self.staleness
        if segment is None:
            return
        key, longest = "generation.segment_tokens", self.algorithm.response_length
        if any(source.environment.on_server for source in self.sources):
            yield self.wrong(
                key,
                "pauses rollouts, and their sessions on an environment's server end meanwhile",
                "Leave it out",
            )
        num_segments = -(-longest // segment)
        if staleness.max_lag == 0:
            yield self.wrong(
                key,
                "pauses answers until a later step, and with staleness.max_lag 0 no later step may train on them",
                "Leave it out, or raise max_lag",
            )
        if self.generation.on_update == "restart":
            yield self.wrong(
                key,
                "continues answers under newer weights, and generation.on_update: restart drops the tokens of older "
                "ones",
                "Leave one of them out",
            )
        if staleness.on_stale != "mask" and staleness.max_lag < num_segments:
            yield self.wrong(
                key,
                f"spreads the longest answer (algorithm.response_length {longest}) over {num_segments} steps, and "
                f"under staleness.on_stale: {staleness.on_stale} max_lag {staleness.max_lag} is too small for its "
                "first tokens",
                f"Set staleness.max_lag: {num_segments} or more, on_stale: mask, or longer segments",
            )

    def _placement_problems(self) -> Iterator[ConfigError]:
        if self.placement == "shared" and self.staleness.max_lag:
            yield self.wrong(
                "staleness.max_lag",
                "lets generators work while the learner trains, and with placement: shared only one of them has the "
                "GPUs",
                "Set staleness.max_lag: 0, or placement: split",
            )
        if self.placement == "shared" and self.generation.on_update == "keep":
            yield self.wrong(
                "generation.on_update",
                "keeps the KV cache at a weight update, and with placement: shared every shift of the learner drops it",
                "Set recompute or restart, or placement: split",
            )
        _ = self.best_figure

    @property
    def best_figure(self) -> BestFigure | None:
        """The figure that evaluation.keep_best names; None where it is not set."""
        of_file = {file: self.source_of(file) for file in self.evaluation.files}
        # Files of one source are alternatives, of which the first is the headline's.
        compared = of_file if len(self.sources) > 1 else dict(islice(of_file.items(), 1))
        return self.evaluation.best_figure(
            {file: source.part_labels for file, source in of_file.items()},
            {file: source.weight for file, source in compared.items()},
        )

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources of prompts, each with its reward and environment; one without a name for data.prompts."""
        return sources_of(self)

    @property
    def several_temperatures(self) -> bool:
        """Whether rollouts may have another temperature than sampling.temperature."""
        of_sources = {source.temperature for source in self.sources}
        return self.agent.sampling == "client" or of_sources != {self.sampling.temperature}

    def splits_clip(self, step: int) -> bool:
        """Whether a step looks at its sequences before the first update and after the last one."""
        every = self.learner.clip_split_every if _SPLIT.is_there(self) else 0
        return every > 0 and step % every == 0

    def source_of(self, file: str) -> Source:
        """The source of a held-out file: the only one, or that of the file's name."""
        return next((source for source in self.sources if source.name == file), self.sources[0])

    def is_measured(self, step: int) -> bool:
        """Whether the version of a step is measured during training; the last version is measured at the end."""
        every = self.evaluation.every
        return bool(self.evaluation.files and every) and step % every == 0 and 0 < step != self.run.total_steps

    @property
    def run_dir(self) -> Path:
        return self.run.directory / self.name

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens in one forward and backward of the learner."""
        return self.learner.micro_batch_tokens or max(MICRO_BATCH_TOKENS, self.algorithm.longest_rollout)

    def divides_over_ranks(self, ranks: int) -> bool:
        """Whether so many ranks are whole groups that share lines, with as many rollouts of a mini-batch each."""
        shared = self.learner.sequence_ranks
        return not ranks % shared and self.algorithm.divides_over(ranks // shared)

    def with_keys(self, **sections: Mapping[str, Any]) -> Config:
        """A copy with other values in its sections, such as `learner={"ranks": 2}`; they are not checked."""
        changed = {name: getattr(self, name).model_copy(update=keys) for name, keys in sections.items()}
        return self.model_copy(update=changed)

    def with_teacher_as_model(self) -> Config:
        keys = ("path", "trust_remote_code", "allow_pickle")
        return self.with_keys(model={key: getattr(self.teacher, key) for key in keys})

    @property
    def registry_dir(self) -> Path:
        """This machine's copy of the registered functions; no run can have its name."""
        return self.reward.registry or self.run.directory / ".rewards"

    @property
    def num_slots(self) -> int:
        """Groups that may be open at a time."""
        return (self.staleness.max_lag + 1) * self.algorithm.rollout_batch_size
