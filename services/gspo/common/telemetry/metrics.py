"""Every metric of every service, declared once.

It serves nothing: probes.py does, and of each service only what is its own. Base units, `_total` for counters, bounded
labels (never a group, rollout or prompt).
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from gspo.common.telemetry.step_time import CAUSES

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

# A series beside each counter that nobody asks.
disable_created_metrics()  # type: ignore[no-untyped-call]
# Whoever else would serve a service's metrics would serve zeros. What is under "" is everyone's.
OF_SERVICE: dict[str, tuple[MetricWrapperBase, ...]] = {}


def _are_of(service: str) -> None:
    """What was declared since the last call is this service's."""
    known = {metric for metrics in OF_SERVICE.values() for metric in metrics}
    declared = [metric for metric in globals().values() if isinstance(metric, MetricWrapperBase)]
    OF_SERVICE[service] = tuple(metric for metric in declared if metric not in known)


# Every service
ACTIVITY_SECONDS = Counter("gspo_activity_seconds", "Time by what the service was doing", ["service", "kind", "what"])
BUILD_INFO = Gauge("gspo_build_info", "1, with the version of gspo as label", ["service", "version"])
CALLS_REFUSED = Counter("gspo_calls_refused", "Calls that no service heard: by door, and why", ["door", "reason"])
DEAD_LETTERS = Counter("gspo_dead_letters", "Entries given up, by the stream they were in", ["stream"])
_are_of("")

# Coordinator
GROUPS_ISSUED = Counter("gspo_groups_issued", "Groups issued, repeats not counted")
GROUPS_REISSUED = Counter("gspo_groups_reissued", "Groups issued again, by reason", ["reason"])
GROUPS_EXTENDED = Counter("gspo_groups_extended", "Times that a group past its deadline went on, further than before")
GROUPS_OPEN = Gauge("gspo_groups_open", "Groups issued and not settled")
SLOTS = Gauge("gspo_slots", "Groups that may be open at a time")
GROUPS_SETTLED = Counter("gspo_groups_settled", "Groups by how they ended", ["settlement"])
EVALUATION_FIGURE = Gauge(
    "gspo_evaluation_figure", "Figures of the last evaluation on a held-out file, as in its record", ["file", "figure"]
)
EVALUATION_VERSION = Gauge("gspo_evaluation_version", "Policy version of the last evaluation", ["file"])
STREAM_ENTRIES = Gauge("gspo_stream_entries", "Entries in a Redis stream: untaken, and under work", ["stream"])
STREAM_UNTAKEN = Gauge("gspo_stream_untaken", "Entries in a Redis stream that nobody has taken", ["stream"])
INSTANCES = Gauge("gspo_instances", "Living processes that are registered with the run", ["service"])
PAUSED = Gauge("gspo_paused", "1 while no new groups are issued: a user paused the run, or too many scores fail")
REDIS_MEMORY = Gauge("gspo_redis_memory_bytes", "Memory that Redis uses")
REDIS_MEMORY_LIMIT = Gauge(
    "gspo_redis_memory_limit_bytes", "Memory that Redis may use: its maxmemory, or the machine's where it has none"
)
_are_of("coordinator")

# Generation
ROLLOUTS_GENERATED = Counter("gspo_rollouts_generated", "Rollouts finished, by outcome", ["outcome", "evaluation"])
TOKENS_GENERATED = Counter("gspo_tokens_generated", "Policy tokens sampled", ["evaluation"])
ROLLOUTS_SAVED = Counter("gspo_rollouts_saved", "Times that a rollout under way was saved")
ROLLOUTS_RESUMED = Counter("gspo_rollouts_resumed", "Rollouts gone on with from what was saved of them")
ROLLOUTS_PAUSED = Counter("gspo_rollouts_paused", "Times that a rollout had to wait for a later step")
TOKENS_RESTARTED = Counter("gspo_tokens_restarted", "Policy tokens dropped because the weights changed under them")
ROLLOUTS_RUNNING = Gauge("gspo_rollouts_running", "Rollouts under way in the engine")
ROLLOUT_QUEUE_SECONDS = Histogram(
    "gspo_rollout_queue_seconds", "From the issue of a group to the start of one of its rollouts", buckets=_LATENCY
)
ROLLOUT_SECONDS = Histogram("gspo_rollout_seconds", "From start to end of one rollout", buckets=_LATENCY)
RESPONSE_TOKENS = Histogram("gspo_response_tokens", "Policy tokens of one rollout", buckets=_TOKENS)
GENERATOR_VERSION = Gauge("gspo_generator_version", "Policy version that the engine serves")
PUSH_PAUSE_SECONDS = Histogram("gspo_push_pause_seconds", "Time generation stood still for a push", buckets=_LATENCY)
PUSHES_RECEIVED = Counter("gspo_pushes_received", "Weight pushes by result", ["result"])
ENVIRONMENT_SECONDS = Histogram(
    "gspo_environment_seconds", "From asking for a reset or step to its answer", ["call"], buckets=_LATENCY
)
ENVIRONMENT_RETRIES = Counter("gspo_environment_retries", "Resets and steps asked again of another reward replica")
ENVIRONMENT_FAILURES = Counter("gspo_environment_failures", "Rollouts ended by their environment's failure", ["kind"])
TURNS = Counter("gspo_turns", "Turns of the policy in conversations")
TOOL_CALLS = Counter("gspo_tool_calls", "Tool calls by tool, and turns with malformed ones", ["tool", "result"])
_are_of("generation")

# Reward
REWARD_CALLS = Counter("gspo_reward_calls", "Calls of a reward function, by result", ["function", "result"])
REWARD_SECONDS = Histogram(
    "gspo_reward_seconds", "Time of one call of a reward function", ["function"], buckets=_LATENCY
)
SCORE_FAILURES = Counter("gspo_score_failures", "Failed scores, by the kind of failure", ["kind"])
ROLLOUTS_SCORED = Counter("gspo_rollouts_scored", "Rollouts scored, or failed", ["result"])
SCORE_QUEUE_SECONDS = Histogram(
    "gspo_score_queue_seconds", "From the end of a rollout until a scorer took it", buckets=_LATENCY
)
SANDBOX_LEVEL = Gauge("gspo_sandbox_level", "What contains user code: 2 bubblewrap, 1 Landlock, 0 rlimits alone")
_are_of("reward")

# Learner
STEP = Gauge("gspo_step", "Steps trained")
STEP_TIMESTAMP = Gauge(
    "gspo_step_timestamp_seconds", "Unix time at which the last step ended, or the learner was ready for the first"
)
POLICY_VERSION = Gauge("gspo_policy_version", "Newest policy version")
STEP_SECONDS = Histogram("gspo_step_seconds", "Time of a step by phase", ["phase"], buckets=_LATENCY)
STEP_TIME_SECONDS = Counter("gspo_step_time_seconds", "Time of steps by what the learner needed it for", ["cause"])
for _cause in CAUSES:  # from zero, so that a rate sees the first step too
    STEP_TIME_SECONDS.labels(_cause)
STEP_FIGURE = Gauge("gspo_step_figure", "Figures of the last step, as in its record", ["figure"])
TOKENS_TRAINED = Counter("gspo_tokens_trained", "Policy tokens trained on")
ROLLOUTS_TRAINED = Counter("gspo_rollouts_trained", "Rollouts trained on")
ROLLOUT_WAIT_SECONDS = Histogram(
    "gspo_rollout_wait_seconds", "From the score of a rollout to the step that trains it", buckets=_LATENCY
)
ROLLOUTS_SKIPPED = Counter("gspo_rollouts_skipped", "Rollouts that came and were not trained on", ["reason"])
STALE_TOKENS = Counter(
    "gspo_stale_tokens", "Policy tokens too old to train on: masked, or dropped with their group", ["how"]
)
STALE_WAIT_SECONDS = Counter(
    "gspo_stale_wait_seconds", "Time the learner waited for groups that a further version would make too old"
)
PUSH_SECONDS = Histogram("gspo_push_seconds", "Time of one weight push to one generator", ["kind"], buckets=_LATENCY)
PUSH_BYTES = Counter("gspo_push_bytes", "Bytes of weights sent", ["kind"])
PUSH_FAILURES = Counter("gspo_push_failures", "Weight pushes that failed, by gRPC status", ["status"])
GENERATORS = Gauge("gspo_generators", "Registered generators by state: current, behind, out", ["state"])
CHECKPOINT_SECONDS = Histogram("gspo_checkpoint_seconds", "Time to write a checkpoint", buckets=_LATENCY)
DISK_FREE = Gauge("gspo_disk_free_bytes", "Free space where the run directory is")
DISK_SIZE = Gauge("gspo_disk_size_bytes", "Size of the disk that the run directory is on")
TRACKER_UP = Gauge("gspo_tracker_up", "1 while the process that feeds a tracker runs", ["tracker"])
_are_of("learner")


class ServiceCollector:
    """What a process of one service serves: what is its own, what every service has, and the process itself."""

    def __init__(self, service: str) -> None:
        others = [metric for of, metrics in OF_SERVICE.items() if of not in (service, "") for metric in metrics]
        self._left_out = {family.name for metric in others for family in metric.describe()}

    def collect(self) -> Iterator[Metric]:
        """The families with their values now."""
        return (family for family in REGISTRY.collect() if family.name not in self._left_out)
