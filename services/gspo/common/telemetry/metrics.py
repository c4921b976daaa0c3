"""Every metric of every service, declared once, in a registry a service.

`common/service/health.py` serves them. Base units, `_total` for counters, bounded labels (never a group, rollout or
prompt).
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from gspo.common.telemetry.step_time import CAUSES

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

# The creation time of each counter would be a series of its own.
disable_created_metrics()  # type: ignore[no-untyped-call]


class ServiceMetrics:
    """The metrics of one service, in a registry of their own: another service would serve them as zeros."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def counter(self, name: str, meaning: str, labels: Sequence[str] = ()) -> Counter:
        """Declare a counter; its exposed name ends in `_total`."""
        return Counter(name, meaning, labels, registry=self.registry)

    def gauge(self, name: str, meaning: str, labels: Sequence[str] = ()) -> Gauge:
        """Declare a gauge."""
        return Gauge(name, meaning, labels, registry=self.registry)

    def histogram(
        self, name: str, meaning: str, labels: Sequence[str] = (), *, buckets: Sequence[float] = _LATENCY
    ) -> Histogram:
        """Declare a histogram, of seconds where no buckets are given."""
        return Histogram(name, meaning, labels, buckets=buckets, registry=self.registry)


_shared, _coordinator, _generation, _reward, _learner = (ServiceMetrics() for _ in range(5))
SHARED = _shared.registry
BY_SERVICE = {
    "coordinator": _coordinator.registry,
    "generation": _generation.registry,
    "reward": _reward.registry,
    "learner": _learner.registry,
}

# Every service
ACTIVITY_SECONDS = _shared.counter(
    "gspo_activity_seconds", "Time by what the service was doing", ["service", "kind", "what"]
)
BUILD_INFO = _shared.gauge("gspo_build_info", "1, with the version of gspo as label", ["service", "version"])
CALLS_REFUSED = _shared.counter(
    "gspo_calls_refused", "Calls that no service heard: by door, and why", ["door", "reason"]
)
DEAD_LETTERS = _shared.counter("gspo_dead_letters", "Entries given up, by the stream they were in", ["stream"])

# Coordinator
GROUPS_ISSUED = _coordinator.counter("gspo_groups_issued", "Groups issued, repeats not counted")
GROUPS_REISSUED = _coordinator.counter("gspo_groups_reissued", "Groups issued again, by reason", ["reason"])
GROUPS_EXTENDED = _coordinator.counter(
    "gspo_groups_extended", "Times that a group past its deadline went on, further than before"
)
GROUPS_OPEN = _coordinator.gauge("gspo_groups_open", "Groups issued and not settled")
SLOTS = _coordinator.gauge("gspo_slots", "Groups that may be open at a time")
GROUPS_SETTLED = _coordinator.counter("gspo_groups_settled", "Groups by how they ended", ["settlement"])
EVALUATION_FIGURE = _coordinator.gauge(
    "gspo_evaluation_figure", "Figures of the last evaluation on a held-out file, as in its record", ["file", "figure"]
)
EVALUATION_VERSION = _coordinator.gauge("gspo_evaluation_version", "Policy version of the last evaluation", ["file"])
STREAM_ENTRIES = _coordinator.gauge(
    "gspo_stream_entries", "Entries in a Redis stream: untaken, and under work", ["stream"]
)
STREAM_UNTAKEN = _coordinator.gauge(
    "gspo_stream_untaken", "Entries in a Redis stream that nobody has taken", ["stream"]
)
INSTANCES = _coordinator.gauge("gspo_instances", "Living processes that are registered with the run", ["service"])
PAUSED = _coordinator.gauge(
    "gspo_paused", "1 while no new groups are issued: a user paused the run, or too many scores fail"
)
REDIS_MEMORY = _coordinator.gauge("gspo_redis_memory_bytes", "Memory that Redis uses")
REDIS_MEMORY_LIMIT = _coordinator.gauge(
    "gspo_redis_memory_limit_bytes", "Memory that Redis may use: its maxmemory, or the machine's where it has none"
)

# Generation
ROLLOUTS_GENERATED = _generation.counter(
    "gspo_rollouts_generated", "Rollouts finished, by outcome", ["outcome", "evaluation"]
)
TOKENS_GENERATED = _generation.counter("gspo_tokens_generated", "Policy tokens sampled", ["evaluation"])
ROLLOUTS_SAVED = _generation.counter("gspo_rollouts_saved", "Times that a rollout under way was saved")
ROLLOUTS_RESUMED = _generation.counter("gspo_rollouts_resumed", "Rollouts gone on with from what was saved of them")
ROLLOUTS_PAUSED = _generation.counter("gspo_rollouts_paused", "Times that a rollout had to wait for a later step")
TOKENS_RESTARTED = _generation.counter(
    "gspo_tokens_restarted", "Policy tokens dropped because the weights changed under them"
)
ROLLOUTS_RUNNING = _generation.gauge("gspo_rollouts_running", "Rollouts under way in the engine")
ROLLOUT_QUEUE_SECONDS = _generation.histogram(
    "gspo_rollout_queue_seconds", "From the issue of a group to the start of one of its rollouts"
)
ROLLOUT_SECONDS = _generation.histogram("gspo_rollout_seconds", "From start to end of one rollout")
RESPONSE_TOKENS = _generation.histogram("gspo_response_tokens", "Policy tokens of one rollout", buckets=_TOKENS)
GENERATOR_VERSION = _generation.gauge("gspo_generator_version", "Policy version that the engine serves")
PUSH_PAUSE_SECONDS = _generation.histogram("gspo_push_pause_seconds", "Time generation stood still for a push")
PUSHES_RECEIVED = _generation.counter("gspo_pushes_received", "Weight pushes by result", ["result"])
ENVIRONMENT_SECONDS = _generation.histogram(
    "gspo_environment_seconds", "From asking for a reset or step to its answer", ["call"]
)
ENVIRONMENT_RETRIES = _generation.counter(
    "gspo_environment_retries", "Resets and steps asked again of another reward replica"
)
ENVIRONMENT_FAILURES = _generation.counter(
    "gspo_environment_failures", "Rollouts ended by their environment's failure", ["kind"]
)
TURNS = _generation.counter("gspo_turns", "Turns of the policy in conversations")
TOOL_CALLS = _generation.counter(
    "gspo_tool_calls", "Tool calls by tool, and turns with malformed ones", ["tool", "result"]
)

# Reward
REWARD_CALLS = _reward.counter("gspo_reward_calls", "Calls of a reward function, by result", ["function", "result"])
REWARD_SECONDS = _reward.histogram("gspo_reward_seconds", "Time of one call of a reward function", ["function"])
SCORE_FAILURES = _reward.counter("gspo_score_failures", "Failed scores, by the kind of failure", ["kind"])
ROLLOUTS_SCORED = _reward.counter("gspo_rollouts_scored", "Rollouts scored, or failed", ["result"])
SCORE_QUEUE_SECONDS = _reward.histogram("gspo_score_queue_seconds", "From the end of a rollout until a scorer took it")
SANDBOX_LEVEL = _reward.gauge(
    "gspo_sandbox_level", "What contains user code: 2 bubblewrap, 1 Landlock, 0 rlimits alone"
)

# Learner
STEP = _learner.gauge("gspo_step", "Steps trained")
STEP_TIMESTAMP = _learner.gauge(
    "gspo_step_timestamp_seconds", "Unix time at which the last step ended, or the learner was ready for the first"
)
POLICY_VERSION = _learner.gauge("gspo_policy_version", "Newest policy version")
STEP_SECONDS = _learner.histogram("gspo_step_seconds", "Time of a step by phase", ["phase"])
STEP_TIME_SECONDS = _learner.counter(
    "gspo_step_time_seconds", "Time of steps by what the learner needed it for", ["cause"]
)
for _cause in CAUSES:  # from zero, so that a rate sees the first step too
    STEP_TIME_SECONDS.labels(_cause)
STEP_FIGURE = _learner.gauge("gspo_step_figure", "Figures of the last step, as in its record", ["figure"])
TOKENS_TRAINED = _learner.counter("gspo_tokens_trained", "Policy tokens trained on")
ROLLOUTS_TRAINED = _learner.counter("gspo_rollouts_trained", "Rollouts trained on")
ROLLOUT_WAIT_SECONDS = _learner.histogram(
    "gspo_rollout_wait_seconds", "From the score of a rollout to the step that trains it"
)
ROLLOUTS_SKIPPED = _learner.counter("gspo_rollouts_skipped", "Rollouts that came and were not trained on", ["reason"])
STALE_TOKENS = _learner.counter(
    "gspo_stale_tokens", "Policy tokens too old to train on: masked, or dropped with their group", ["how"]
)
STALE_WAIT_SECONDS = _learner.counter(
    "gspo_stale_wait_seconds", "Time the learner waited for groups that a further version would make too old"
)
PUSH_SECONDS = _learner.histogram("gspo_push_seconds", "Time of one weight push to one generator", ["kind"])
PUSH_BYTES = _learner.counter("gspo_push_bytes", "Bytes of weights sent", ["kind"])
PUSH_FAILURES = _learner.counter("gspo_push_failures", "Weight pushes that failed, by gRPC status", ["status"])
GENERATORS = _learner.gauge("gspo_generators", "Registered generators by state: current, behind, out", ["state"])
CHECKPOINT_SECONDS = _learner.histogram("gspo_checkpoint_seconds", "Time to write a checkpoint")
DISK_FREE = _learner.gauge("gspo_disk_free_bytes", "Free space where the run directory is")
DISK_SIZE = _learner.gauge("gspo_disk_size_bytes", "Size of the disk that the run directory is on")
TRACKER_UP = _learner.gauge("gspo_tracker_up", "1 while the process that feeds a tracker runs", ["tracker"])


def served_by(service: str) -> CollectorRegistry:
    """What a process of a service serves: the service's metrics, those of every service, and the process's own."""
    served = CollectorRegistry()
    for registry in (SHARED, BY_SERVICE[service], REGISTRY):
        served.register(registry)
    return served
