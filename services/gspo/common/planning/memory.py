"""Bytes of memory by part, of a rank of the learner, of a generator and of the host, for every check and plan.

Sizes follow DeepSpeed 0.19.8 with float32 parameters: ZeRO 1 divides the optimizer's states over the ranks, 2 also the
gradients, 3 also the weights (arXiv 1910.02054, section 5). Comments name the places in its package where it copies.
"""

from dataclasses import dataclass

from gspo.common.config.engines import LearnerConfig
from gspo.common.config.schema import Config
from gspo.common.host.machine import GIB
from gspo.common.model.trained_parameters import TrainedSize
from gspo.common.planning.deepspeed_buffers import buffer_sizes
from gspo.common.planning.model_profile import ModelProfile

FLOAT32_BYTES = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# CUDA's own memory in a process, beside the allocated tensors.
CONTEXT_BYTES = GIB
# Assumed: the part of a GPU that its allocator cannot use, because the free memory is in pieces.
FRAGMENTED_SHARE = 0.05
# The ZeRO stages from which on gradients and weights are divided.
_DIVIDED_GRADIENTS, _DIVIDED_WEIGHTS = 2, 3
# Of learner/model/network.py and gspo_core/logprobs.py: logits that the output layer makes at a time, and at least the
# logits of so many tokens; then those that softmax works on.
_LOGITS, _LOGIT_ROWS, _BLOCK_LOGITS = 2**24, 512, 2**22
# On a GPU the gradient of the weight is read and written once for so many rows.
FUSED_ROWS = 4096
# Rows of logits that softmax works on there at least, without torch_compile.
_BLOCK_ROWS = 256
# Of the activations that a compiled layer keeps for its backward pass: 0.55 on one GPU, of a Qwen3-0.6B.
_COMPILED_SHARE = 0.65
# Policies that the ranks share and keep for pushes: the newest, the next while it is made, one still packed or sent.
_PUBLISHED = 3
# Policies in the memory of a host of generators with GPUs: the served one and the next one. Several keep one more, for
# those that are behind.
_STAGED = 2
# Assumed for vLLM: CUDA graphs and workspaces, and the copies of the logits of a batch that its sampler makes.
_ENGINE_BYTES, _SAMPLER_COPIES = 2 * GIB, 3
# vLLM's tokens of one forward pass on a GPU with 80 GiB.
_BATCHED_TOKENS = 8192


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank of the learner, by part.

    Attributes:
        weights, gradients, optimizer: On its device for the whole run; AdamW's two moments.
        reference: The frozen first policy of a KL term.
        teacher: The frozen model of the section `teacher`.
        buckets: DeepSpeed's buffers in a pass: gradients that are reduced, and under ZeRO 3 gathered weights.
        activations: What one micro-batch saves for its backward pass, and the gradients of one layer; 0 if the model
            was not profiled.
        output_layer: Logits of a chunk, the gradient of the output weight, and on a GPU its rounded copy; 0 if the
            model was not profiled.
        update: DeepSpeed's buffers in an optimizer step, instead of the three parts above: gradients in one piece.
        loading: On the device while the model loads, instead of all parts above; 0 under ZeRO 3.
        offloaded: In host memory instead of on the device; of an offloaded optimizer also the weights that it updates.
    """

    weights: float
    gradients: float
    optimizer: float
    reference: float
    teacher: float
    buckets: float
    activations: float
    output_layer: float
    update: float
    loading: float
    offloaded: float

    @property
    def states(self) -> float:
        """Bytes on the device for the whole run."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.teacher

    @property
    def peak(self) -> float:
        """The most bytes on the device at a time."""
        return sum(self.parts_at_peak().values())

    def parts_at_peak(self) -> dict[str, float]:
        """Name -> bytes of the parts that the device has when it has the most: in a pass, a step, or the load."""
        states = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "reference": self.reference,
            "teacher": self.teacher,
        }
        in_a_pass = {"buckets": self.buckets, "activations": self.activations, "output layer": self.output_layer}
        times = (
            {**states, **in_a_pass},
            {**states, "buffers of a step": self.update},
            {"loading the model": self.loading},
        )
        return max(times, key=lambda parts: sum(parts.values()))


def rank_memory(
    config: Config, size: TrainedSize, ranks: int, *, profile: ModelProfile | None = None, on_gpu: bool = True
) -> RankMemory:
    """The memory of one of so many ranks.

    Under LoRA only adapters have gradients and moments, and the base is its own reference.

    Args:
        profile: The model's; without it activations and output layer are not counted.
        on_gpu: On a CPU a buffer takes only the pages that are used.
    """
    learner, stage = config.learner, config.learner.zero_stage
    divided = ranks if stage >= _DIVIDED_WEIGHTS else 1
    weights = FLOAT32_BYTES * size.num_parameters / divided
    if learner.lora.rank:
        # Below ZeRO 3 the frozen ones are stored as the products take them.
        rounded = size.num_bfloat16 if stage < _DIVIDED_WEIGHTS else 0
        weights = (_stored_bytes(config, size.num_parameters, rounded) + FLOAT32_BYTES * size.num_trained) / divided
    offloads_weights, offloads_optimizer = learner.offload == "all", learner.offload != "none"
    optimizer = FLOAT32_BYTES * size.num_trained * (3 if offloads_optimizer else 2) / (ranks if stage else 1)
    has_copy = config.algorithm.needs_reference and not learner.lora.rank
    gradients, gradients_on_host = _gradient_bytes(size.num_trained / ranks, config, ranks)
    buckets, update = _buffer_bytes(config, size, ranks, profile, on_gpu=on_gpu)
    activations, output_layer = pass_bytes(config, profile, on_gpu=on_gpu) if profile else (0.0, 0.0)
    return RankMemory(
        weights=0.0 if offloads_weights else weights,
        gradients=gradients,
        optimizer=0.0 if offloads_optimizer else optimizer,
        reference=_stored_bytes(config, size.num_parameters, size.num_rounded) / divided if has_copy else 0.0,
        teacher=_stored_bytes(config, size.num_teacher, size.num_teacher_rounded) / divided,
        buckets=buckets,
        activations=activations,
        output_layer=output_layer,
        update=update,
        loading=loading_bytes(size, stage),
        offloaded=gradients_on_host + optimizer * offloads_optimizer + weights * offloads_weights,
    )


def _gradient_bytes(num_own: float, config: Config, ranks: int) -> tuple[float, float]:
    """Bytes of gradients: (on the device, on the host beside an offloaded optimizer).

    Args:
        num_own: The parameters whose moments a rank has.
    """
    stage, own = config.learner.zero_stage, FLOAT32_BYTES * num_own
    if config.learner.offload == "none":
        # Stage 2 keeps the sum of earlier micro-batches beside the gradients of the present one (stage_1_and_2.py,
        # all_grad_tensors), and in a step the optimizer's copy (single_grad_partition). Stage 3 adds up in place.
        return own * {2: 2, 3: 1}.get(stage, ranks), 0.0
    if stage >= _DIVIDED_WEIGHTS:
        # stage3.py: collected in grad_partitions_flat_buffer, for the optimizer in fp32_partitioned_groups_flat.
        return 0.0, 2 * own
    # stage_1_and_2.py: collected in accumulated_grads_in_cpu, for the optimizer in single_partition_of_fp32_groups. By
    # a third buffer, param_buffer_of_bit16_for_cpu_offload_groups, the updated weights return.
    return (0.0 if stage >= _DIVIDED_GRADIENTS else own * ranks), 3 * own


def loading_bytes(size: TrainedSize, stage: int) -> float:
    """Bytes of a rank, on the device and before that on the host, while the model loads: all of it.

    Under ZeRO 3 nothing beside its parts: it reads one weight after another, and less at a time than a step gathers.
    """
    return 0.0 if stage >= _DIVIDED_WEIGHTS else FLOAT32_BYTES * max(size.num_parameters, size.num_teacher)


def _stored_bytes(config: Config, num_parameters: int, num_rounded: int) -> float:
    """Bytes of a whole frozen model: some weights in the dtype of the products, all others in float32."""
    return FLOAT32_BYTES * (num_parameters - num_rounded) + DTYPE_BYTES[config.learner.dtype] * num_rounded


def _buffer_bytes(
    config: Config, size: TrainedSize, ranks: int, profile: ModelProfile | None, *, on_gpu: bool
) -> tuple[float, float]:
    """Bytes of DeepSpeed's buffers: (in a pass, in an optimizer step)."""
    stage, num_trained = config.learner.zero_stage, size.num_trained
    sizes, largest = buffer_sizes(config.learner), profile.largest_weight if profile else 0
    if not stage:
        # Also on one rank: engine.py, allreduce_bucket, flattens the gradients that it reduces.
        return FLOAT32_BYTES * min(sizes.bucket, num_trained), 0.0
    bucket = sizes.bucket if on_gpu else min(sizes.bucket, num_trained)
    # A full bucket is copied in the order of the ranks that it is for: allreduce_bucket, reduce_scatter_coalesced.
    in_a_pass, own = 2 * bucket, num_trained / ranks
    if stage < _DIVIDED_WEIGHTS:
        if config.learner.offload != "none":
            return FLOAT32_BYTES * (in_a_pass + largest), 0.0  # temp_grad_buffer_for_gpu_offload
        # Stage 1 frees the gradients of other ranks before it copies its own: more only where one rank has all.
        return FLOAT32_BYTES * in_a_pass, FLOAT32_BYTES * max(0, 2 * own - num_trained) * (stage == 1)
    # While fewer gathered weights live than its limit, stage 3 gathers the next one too. Its bucket stays.
    in_a_pass += min(sizes.live + largest, size.num_parameters)
    copied = 0.0 if config.learner.offload != "none" else min(sizes.sub_group, own)  # _prepare_fp32_grad_for_sub_group
    return FLOAT32_BYTES * in_a_pass, FLOAT32_BYTES * (bucket + copied)


def pass_bytes(config: Config, profile: ModelProfile, *, on_gpu: bool) -> tuple[float, float]:
    """Bytes of one micro-batch on a rank: (activations, output layer). Ranks that share a line divide its tokens.

    Under gradient checkpointing every layer keeps its input alone, and the backward pass makes one layer's activations
    again. The gradients of one layer's activations take as much as these.
    """
    num_tokens = config.micro_batch_tokens / config.learner.sequence_ranks
    fixed, a_token, a_pair = profile.saved_bytes[config.learner.dtype]
    longest = config.algorithm.prompt_length + config.algorithm.response_length
    saved = fixed + (a_token + a_pair * longest) * num_tokens
    if config.learner.torch_compile:
        saved *= _COMPILED_SHARE
    a_layer = saved / profile.num_layers
    if config.learner.gradient_checkpointing:
        learner = config.learner
        rounded = learner.dtype == "bfloat16" and learner.bfloat16_states
        a_number = DTYPE_BYTES["bfloat16"] if rounded else FLOAT32_BYTES
        saved = a_number * profile.width * num_tokens * profile.num_layers + a_layer
    return saved + a_layer, _output_layer_bytes(config, profile, num_tokens, on_gpu=on_gpu)


def takes_many_rows(learner: LearnerConfig) -> bool:
    """Whether the output layer takes FUSED_ROWS at a time on a GPU; runs that began before took fewer."""
    return learner.torch_compile or (learner.dtype == "bfloat16" and learner.bfloat16_states)


def _output_layer_bytes(config: Config, profile: ModelProfile, num_tokens: float, *, on_gpu: bool) -> float:
    """The states and their gradient, the logits of a chunk, softmax's block, and the gradient of the weight.

    On a GPU, softmax's block is at most half a chunk, and none under `torch_compile`. Under bfloat16 the weight and the
    gradient of a chunk's logits have rounded copies there.
    """
    states, weight = 2 * num_tokens * profile.width, profile.vocabulary * profile.width
    chunk = float(max(_LOGIT_ROWS * profile.vocabulary, _LOGITS))
    if on_gpu and takes_many_rows(config.learner):
        chunk = min(FUSED_ROWS, num_tokens) * profile.vocabulary
    least = max(_BLOCK_ROWS * profile.vocabulary, _LOGITS)
    block = min(chunk / 2, least) if on_gpu else max(_BLOCK_LOGITS, profile.vocabulary)
    if config.learner.torch_compile:
        chunk = chunk if on_gpu else 2 * chunk
        block = 0.0 if on_gpu else chunk
    dtype = config.learner.dtype
    rounded = DTYPE_BYTES[dtype] * (weight + chunk) if on_gpu and dtype != "float32" else 0.0
    return FLOAT32_BYTES * (states + chunk + block + weight) + rounded


def reserved_bytes(gpu_bytes: float) -> float:
    """Bytes of a GPU that no tensor of the learner can use: CUDA's own, and an assumed share in pieces."""
    return CONTEXT_BYTES + FRAGMENTED_SHARE * gpu_bytes


def host_bytes(config: Config, memory: RankMemory, *, on_gpu: bool) -> float:
    """Bytes of the machine's own memory for a rank, without activations.

    On a GPU these are the offloaded bytes, and at the start the model, which below ZeRO 3 is loaded there first. On
    shared GPUs all states are there while the generators have the GPUs.
    """
    lasting = memory.offloaded
    if not on_gpu:
        lasting += memory.states + max(memory.buckets, memory.update)
    elif config.placement == "shared":
        lasting += memory.states
    return max(lasting, memory.loading)


def snapshot_bytes(config: Config, size: TrainedSize) -> float:
    """Bytes of the snapshot in host memory: with a lag, one earlier version of the trained weights.

    The first rank has it, or under ZeRO 3 each rank a part.
    """
    keeps = config.staleness.max_lag and config.learner.mismatch_every
    return FLOAT32_BYTES * size.num_trained if keeps else 0


def learner_host_bytes(config: Config, size: TrainedSize, ranks: int, ranks_here: int, *, on_gpu: bool) -> float:
    """Bytes of the first rank's machine for training, without activations and without the policies for pushes.

    Args:
        ranks: Those of the whole learner.
        ranks_here: Those on this machine.
    """
    a_rank = host_bytes(config, rank_memory(config, size, ranks, on_gpu=on_gpu), on_gpu=on_gpu)
    snapshot_here = ranks_here / ranks if config.learner.zero_stage >= _DIVIDED_WEIGHTS else 1
    return a_rank * ranks_here + snapshot_bytes(config, size) * snapshot_here


def checkpoint_bytes(config: Config, size: TrainedSize, ranks: int, ranks_here: int) -> float:
    """Bytes of the copies that ranks make for a checkpoint: weights and two moments, each share once.

    Args:
        ranks: Those of the whole learner.
        ranks_here: Those on the first rank's machine. Without ZeRO the first rank alone copies.
    """
    return FLOAT32_BYTES * 3 * size.num_trained * (ranks_here / ranks if config.learner.zero_stage else 1)


def policy_bytes(config: Config, num_parameters: int) -> float:
    """Bytes of a policy version as it is pushed, in the generators' dtype."""
    return num_parameters * DTYPE_BYTES[config.generation.dtype]


def published_bytes(config: Config, num_parameters: int, ranks: int, ranks_here: int) -> float:
    """Bytes of the policies that ranks keep in host memory for pushes, each the layers that it owns.

    Args:
        ranks: Those of the whole learner.
        ranks_here: Those that are counted.
    """
    return _PUBLISHED * policy_bytes(config, num_parameters) * ranks_here / ranks


def staged_bytes(config: Config, num_parameters: int, generators_here: int) -> float:
    """Bytes of the policies that a host's generators with GPUs have in common in its memory."""
    policies = _STAGED + (generators_here > 1) if generators_here else 0
    return policies * policy_bytes(config, num_parameters)


@dataclass(frozen=True)
class GeneratorMemory:
    """Bytes of one generator on each of its GPUs, by part.

    Attributes:
        working: Activations, the sampler's logits and vLLM's own workspaces (assumed).
        kv_cache: The rest of vLLM's share; not above 0 if the weights alone are too much.
        tokens: That the KV cache of the whole generator holds.
    """

    weights: float
    working: float
    kv_cache: float
    tokens: float


def generator_memory(
    config: Config, profile: ModelProfile, gpu_bytes: float, *, share: float, tensor_parallel: int
) -> GeneratorMemory:
    """The memory of a generator on so many equal GPUs of which vLLM takes a share each.

    Keys and values are divided by heads: more GPUs than heads each keep a copy.
    """
    weights = policy_bytes(config, profile.num_parameters) / tensor_parallel
    activations = _BATCHED_TOKENS * profile.width * 8 * DTYPE_BYTES[config.generation.dtype]
    logits = FLOAT32_BYTES * profile.vocabulary * config.generation.max_rollouts * _SAMPLER_COPIES
    working = _ENGINE_BYTES + activations + logits / tensor_parallel
    kv_cache = share * gpu_bytes - weights - working
    return GeneratorMemory(weights, working, kv_cache, kv_cache / kv_bytes(config, profile, tensor_parallel))


def kv_bytes(config: Config, profile: ModelProfile, tensor_parallel: int = 1) -> float:
    """Bytes of one token's keys and values on each GPU of a generator."""
    parts = min(tensor_parallel, profile.num_kv_heads)
    return profile.num_kv * DTYPE_BYTES[config.generation.dtype] / parts
