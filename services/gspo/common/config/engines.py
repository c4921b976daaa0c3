"""The sections of the engines: `sampling` and `generation` for vLLM, `learner` for DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, StringConstraints

from gspo.common.config.fields import FIXED, ON_GPUS, ON_RESUME, FilePath, FreeMapping, Owner, Section
from gspo.common.errors import ConfigError

# On two cores 2048 took 0.6 of the time of 8192 for answers of mixed lengths: it stays in the cache.
MICRO_BATCH_TOKENS = 2048
# A probe took 0.2 of a step of 32 rollouts on a CPU, so this is 0.4 % of the time; larger steps have the same probe.
MISMATCH_EVERY = 50
# Two passes forward in so many steps: some 3 % of the time of training.
CLIP_SPLIT_EVERY = 20
# vLLM checks no more at a time.
MOST_DRAFT_TOKENS = 128
# The ZeRO stage that leaves a rank a part of every weight.
SPREAD_STAGE = 3
# vLLM samples at 0.01 where it is asked for less, and refuses more than 2.
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0
# Tokens that one is sampled from; at 4 bytes each they travel with it, and are logged.
LEAST_TOP_K, MOST_TOP_K = 2, 64
# vLLM keeps every token that ties with the last of top_k; so many more are listed before a set is not known.
SPARE_TOKENS = 16
MOST_KEPT = MOST_TOP_K + SPARE_TOKENS
Temperature = Annotated[float, Field(ge=LEAST_TEMPERATURE, le=MOST_TEMPERATURE)]
# vLLM refuses an empty one.
StopString = Annotated[str, StringConstraints(min_length=1)]
Dtype = Literal["float32", "bfloat16", "float16"]


class SamplingConfig(Section):
    """How rollouts are sampled."""

    temperature: Temperature = Field(
        1.0, description="Training and sampled evaluation; the learner's log-probs use it too"
    )
    top_k: int = Field(
        0,
        description="Sample each token from the likeliest so many, 2 to 64 (Qwen recommends 20): the learner's "
        "log-probs are then of these tokens alone, which travel with the rollout. 0 or -1: off",
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="Of these, from the likeliest that reach this probability together; 1: off"
    )
    min_p: float = Field(
        0.0, ge=0, lt=1, description="Of these, from those with this share of the likeliest's probability; 0: off"
    )
    stop: tuple[StopString, ...] = Field((), description="Strings that end an answer; their tokens are the policy's")

    def problems(self) -> Iterator[ConfigError]:
        if self.top_k not in (-1, 0) and not LEAST_TOP_K <= self.top_k <= MOST_TOP_K:
            yield self.wrong(
                "top_k",
                f"must be {LEAST_TOP_K} to {MOST_TOP_K}: one token leaves nothing to learn, and the ids of all that "
                "are kept travel with each token",
                f"Set it to {MOST_TOP_K} or less, or to 0 for the whole distribution",
            )
        for key, off in (("top_p", 1.0), ("min_p", 0.0)):
            if getattr(self, key) != off and not self.cuts:
                yield self.wrong(
                    key,
                    "cuts the distribution to any number of tokens. The learner needs the ids of all of them for its "
                    "log-probs over the same set, or the ratio would be biased",
                    f"Set sampling.top_k too, up to {MOST_TOP_K}, or {key}: {off:g}",
                )

    @property
    def cuts(self) -> bool:
        """Whether tokens are sampled from a part of the distribution."""
        return self.top_k > 0


class GenerationConfig(Section):
    """The vLLM engines."""

    may_change = True

    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Weights and arithmetic of generation", json_schema_extra={ON_GPUS: "bfloat16"}
    )
    replicas: PositiveInt = Field(
        1, le=4096, description="Generators that `gspo run` starts", json_schema_extra={ON_GPUS: "a balanced split"}
    )
    on_update: Literal["recompute", "keep", "restart"] = Field(
        "recompute",
        description="In-flight rollouts at a weight update: recompute the KV cache, keep it (cheaper, drifts), or "
        "restart sampling",
        json_schema_extra=FIXED,
    )
    segment_tokens: PositiveInt | None = Field(
        None,
        description="Tokens that a rollout may sample under one version while tasks are queued; then it is paused "
        "until the next version. null: no limit",
    )
    save_tokens: PositiveInt = Field(512, description="Most tokens of a rollout that a generator's crash may cost")
    max_rollouts: PositiveInt = Field(256, description="In-flight rollouts of one engine (vLLM's max_num_seqs)")
    draft_tokens: int = Field(
        0,
        ge=0,
        le=MOST_DRAFT_TOKENS,
        description="Tokens that are proposed at a time from repetitions in a request, and checked in one pass (n-gram "
        "speculation). Faster where answers repeat themselves, slower elsewhere; 0: none",
    )
    kv_cache_gb: PositiveFloat = Field(1.0, description="Memory of the KV cache on the CPU, in GiB")
    threads: int = Field(0, ge=0, description="CPU threads of one engine; 0 takes every core but one")
    push_timeout_s: PositiveFloat = Field(
        60.0,
        description="Least time limit of a weight push, and of the load in the engine. It grows with the policy's "
        "bytes and the time of earlier pushes",
    )
    checksums_every: int = Field(
        0,
        ge=0,
        description="Compare the weights in all engines by checksums, every so many versions; 0: never. An engine "
        "stands while it reads its weights",
    )
    engine: FreeMapping = Field(default_factory=dict, description="Further engine arguments, with vLLM's names")


class LoraConfig(Section):
    """Low-rank adapters (LoRA): train them instead of the weights."""

    OWNER = Owner("learner.lora.rank, such as 16", attrgetter("rank"), ("rank",))
    rank: int = Field(0, ge=0, description="Rank of the adapters; 0 trains the weights themselves")
    alpha: PositiveFloat = Field(32.0, description="The adapters' product is scaled by alpha / rank")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Dropout at the adapters' inputs while training; none at a mixture's experts"
    )
    target_modules: tuple[str, ...] = Field(
        ("all-linear",),
        min_length=1,
        description="Layers with adapters, by the end of their names in the checkpoint, such as q_proj; all-linear:"
        " all, also experts and routers",
    )


_BFLOAT16 = Owner("learner.dtype: bfloat16", lambda learner: learner.dtype == "bfloat16")
_NO_ADAPTERS = Owner(
    "learner.lora.rank, whose adapters are matrices alone", lambda learner: not learner.lora.rank, is_rival=True
)


class LearnerConfig(Section):
    """The DeepSpeed learner."""

    BEFORE: ClassVar[Mapping[str, Any]] = {
        "decay_matrices_only": False,
        "bfloat16_states": False,
        "clip_split_every": 0,
        "model_dropout": True,
    }
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Arithmetic of training; bfloat16 keeps fp32 master weights, and on CPUs a float32 output layer",
        json_schema_extra={ON_GPUS: "bfloat16"},
    )
    bfloat16_states: Annotated[bool, _BFLOAT16] = Field(
        True,
        description="Whether states between layers are bfloat16 too: the residual stream, and what norms give on. Runs "
        "that began without it keep them in float32",
    )
    model_dropout: bool = Field(
        False,
        description="Whether the dropout of the model's config.json and the noise of its routers act in training. "
        "Engines sample without them, so ratios get noise. Runs that began before this key go on with them",
    )
    learning_rate: PositiveFloat = Field(1e-6, description="Peak learning rate of AdamW", json_schema_extra=ON_RESUME)
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate after the warm-up, towards run.total_steps", json_schema_extra=ON_RESUME
    )
    warmup_steps: int = Field(
        0, ge=0, description="Steps over which the learning rate rises", json_schema_extra=ON_RESUME
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay", json_schema_extra=ON_RESUME)
    decay_matrices_only: Annotated[bool, _NO_ADAPTERS] = Field(
        True,
        description="Whether weight decay leaves norms and biases as they are. Runs that began without it go on so",
    )
    adam_betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's moment decays")
    adam_eps: PositiveFloat = Field(1e-8, description="AdamW's epsilon, added to the root of the second moment")
    max_grad_norm: PositiveFloat = Field(
        1.0, description="Gradients are scaled down to this norm", json_schema_extra=ON_RESUME
    )
    micro_batch_tokens: PositiveInt | None = Field(
        None,
        description="Tokens of a micro-batch. null: 2048, or the longest rollout if that is more. A start fills it in, "
        "on GPUs as far as their memory goes, up to a whole mini-batch",
        json_schema_extra={**ON_RESUME, ON_GPUS: "what fits"},
    )
    packing: bool = Field(
        True, description="Train rollouts without padding, if the model supports it", json_schema_extra=ON_RESUME
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Recompute activations in the backward pass: less memory, more time",
        json_schema_extra={**ON_RESUME, ON_GPUS: "true if memory needs it"},
    )
    torch_compile: bool = Field(
        False,
        description="Compile a dense model's layers and the arithmetic of its output layer with torch.compile: faster "
        "on GPUs, with other rounding, after a slower first step",
        json_schema_extra={ON_GPUS: "true if dense"},
    )
    zero_stage: int = Field(
        0,
        ge=0,
        le=3,
        description="DeepSpeed ZeRO divides over ranks: 1 optimizer states, 2 also gradients, 3 also weights",
        json_schema_extra={**ON_RESUME, ON_GPUS: "the fastest that fits"},
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="Keep in host memory: optimizer states (zero_stage 1 to 3), or all with weights (zero_stage 3)",
        json_schema_extra={**ON_RESUME, ON_GPUS: "the fastest that fits"},
    )
    ranks: int = Field(
        1,
        ge=0,
        le=4096,
        description="Ranks of the learner on all machines, one for each GPU. 0 is of runs whose ranks were started by "
        "hand, and starts nothing",
        json_schema_extra={**ON_RESUME, ON_GPUS: "a balanced split"},
    )
    sequence_ranks: int = Field(
        1,
        ge=1,
        le=4096,
        description="Adjacent ranks that share each packed micro-batch, for long answers: each has a part of its "
        "positions. It divides the number of ranks and the model's heads",
        json_schema_extra=ON_RESUME,
    )
    rank_timeout_s: PositiveFloat = Field(
        600.0, description="Longest wait of a rank for another; then the learner restarts", json_schema_extra=ON_RESUME
    )
    threads: int = Field(0, ge=0, description="CPU threads of a rank; 0 shares all cores out among them")
    token_records: bool = Field(
        False,
        description="Whether the log-prob and the entropy of each trained token, at the update that trained it, are "
        "written to log/tokens-*.parquet, from which the page of a rollout takes ratios",
        json_schema_extra=ON_RESUME,
    )
    mismatch_every: int = Field(
        MISMATCH_EVERY,
        ge=0,
        description="Most steps between two measurements of the engines' mismatch with a lag, by a probe under the "
        "weights of an earlier version. Tokens of the newest version are measured without it. 0: no probe",
        json_schema_extra=ON_RESUME,
    )
    clip_split_every: int = Field(
        CLIP_SPLIT_EVERY,
        ge=0,
        description="In one of so many steps, the learner looks at all sequences before the first update and after "
        "the last one. So it knows how many the policy's movement puts outside the clip. 0: never",
        json_schema_extra=ON_RESUME,
    )
    deepspeed: dict[str, Any] | FilePath = Field(
        default_factory=dict,
        description="Further DeepSpeed configuration, a mapping or the path of a JSON file. Contradictions to keys "
        "here are errors; 'auto' means the value here",
    )
    lora: LoraConfig = Field(default_factory=LoraConfig)
