"""Every metric of every service, declared once, in a registry a service.

`common/service/health.py` serves them. Base units, `_total` for counters, bounded labels (never a group, rollout or
prompt).
"""

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
        return Gauge(name, meaning, labels, registry=self.registry)

    def histogram(
        self, name: str, meaning: str, labels: Sequence[str] = (), *, buckets: Sequence[float] = _LATENCY
    ) -> Histogram:
        """Declare a histogram, of seconds where no buckets are given."""
        return Histogram(name, meaning, labels, buckets=buckets, registry=self.registry)


_shared, _coordinator, _generation, _gateway, _agents, _reward, _learner = (ServiceMetrics() for _ in range(7))
SHARED = _shared.registry
BY_SERVICE = {
    "coordinator": _coordinator.registry,
    "generation": _generation.registry,
    "gateway": _gateway.registry,
    "agents": _agents.registry,
    "reward": _reward.registry,
    "learner": _learner.registry,
}

# Every service
ACTIVITY_SECONDS = _shared.counter(
    "gspo_activity_seconds", "Time of a service by activity", ["service", "kind", "what"]
)
BUILD_INFO = _shared.gauge("gspo_build_info", "1, with the version of gspo as label", ["service", "version"])
CALLS_REFUSED = _shared.counter("gspo_calls_refused", "Rejected calls, by protocol and reason", ["protocol", "reason"])
DEAD_LETTERS = _shared.counter("gspo_dead_letters", "Dead letters, by the stream of the entry", ["stream"])

# Coordinator
GROUPS_ISSUED = _coordinator.counter("gspo_groups_issued", "Groups issued, without repeats")
GROUPS_REISSUED = _coordinator.counter("gspo_groups_reissued", "Groups issued again, by reason", ["reason"])
GROUPS_EXTENDED = _coordinator.counter(
    "gspo_groups_extended", "Deadlines extended because the group's rollouts had progressed"
)
GROUPS_OPEN = _coordinator.gauge("gspo_groups_open", "Groups issued and not settled")
SLOTS = _coordinator.gauge("gspo_slots", "Most groups open at a time")
PROMPTS_EQUAL = _coordinator.gauge(
    "gspo_prompts_equal", "Under data.curriculum: prompts whose last known group had equal rewards", ["source"]
)
FINDING = _coordinator.gauge(
    "gspo_finding",
    "Whether a rule on learning has a finding at the newest step, or a check of held-out prompts had one",
    ["rule"],
)
GROUPS_SETTLED = _coordinator.counter("gspo_groups_settled", "Groups settled, by settlement", ["settlement"])
EVALUATION_FIGURE = _coordinator.gauge(
    "gspo_evaluation_figure", "Figures of the last evaluation on a held-out file, as in its record", ["file", "figure"]
)
EVALUATION_VERSION = _coordinator.gauge("gspo_evaluation_version", "Policy version of the last evaluation", ["file"])
STREAM_ENTRIES = _coordinator.gauge("gspo_stream_entries", "Entries in a Redis stream, untaken or leased", ["stream"])
STREAM_UNTAKEN = _coordinator.gauge("gspo_stream_untaken", "Entries in a Redis stream without a consumer", ["stream"])
INSTANCES = _coordinator.gauge("gspo_instances", "Processes registered with the run", ["service"])
PAUSED = _coordinator.gauge("gspo_paused", "1 while the run is paused, by a user or by failed scores")
REDIS_MEMORY = _coordinator.gauge("gspo_redis_memory_bytes", "Memory of Redis")
REDIS_MEMORY_LIMIT = _coordinator.gauge(
    "gspo_redis_memory_limit_bytes", "Memory limit of Redis: its maxmemory, else that of the machine"
)

# Generation
ROLLOUTS_GENERATED = _generation.counter(
    "gspo_rollouts_generated", "Rollouts finished, by outcome", ["outcome", "evaluation"]
)
TOKENS_GENERATED = _generation.counter("gspo_tokens_generated", "Policy tokens sampled", ["evaluation"])
DRAFT_TOKENS = _generation.counter(
    "gspo_draft_tokens", "Proposed tokens of ended requests, accepted or rejected", ["result"]
)
ROLLOUTS_SAVED = _generation.counter("gspo_rollouts_saved", "Saves of in-flight rollouts")
ROLLOUTS_RESUMED = _generation.counter("gspo_rollouts_resumed", "Partial rollouts resumed from saved tokens")
ROLLOUTS_PAUSED = _generation.counter("gspo_rollouts_paused", "Rollouts paused until a later version")
TOKENS_RESTARTED = _generation.counter("gspo_tokens_restarted", "Policy tokens dropped at a weight update")
ROLLOUTS_RUNNING = _generation.gauge("gspo_rollouts_running", "Rollouts of leased tasks that take a place")
ROLLOUT_QUEUE_SECONDS = _generation.histogram(
    "gspo_rollout_queue_seconds", "Time from the issue of a group to the start of a rollout"
)
ROLLOUT_SECONDS = _generation.histogram("gspo_rollout_seconds", "Time of one rollout")
RESPONSE_TOKENS = _generation.histogram("gspo_response_tokens", "Policy tokens of one rollout", buckets=_TOKENS)
GENERATOR_VERSION = _generation.gauge("gspo_generator_version", "Policy version of the engine")
PUSH_PAUSE_SECONDS = _generation.histogram("gspo_push_pause_seconds", "Pause of generation for a push")
PUSHES_RECEIVED = _generation.counter("gspo_pushes_received", "Weight pushes by result", ["result"])
ENVIRONMENT_SECONDS = _generation.histogram("gspo_environment_seconds", "Time of a reset or step, by call", ["call"])
ENVIRONMENT_RETRIES = _generation.counter(
    "gspo_environment_retries", "Resets and steps repeated at another reward replica, or at an environment's server"
)
ENVIRONMENT_SESSIONS = _generation.gauge(
    "gspo_environment_sessions", "Sessions on an environment's server that rollouts here have"
)
SESSIONS_LOST = _generation.counter(
    "gspo_sessions_lost", "Sessions that an environment's server lost; the rollout began anew", ["kind"]
)
SESSIONS_REPLAYED = _generation.counter(
    "gspo_sessions_replayed", "Sessions made again by their actions in place of lost ones (environment.replay)"
)
ENVIRONMENT_FAILURES = _generation.counter(
    "gspo_environment_failures", "Rollouts ended by a failed environment", ["kind"]
)
TURNS = _generation.counter("gspo_turns", "Turns of the policy in conversations")
TOOL_CALLS = _generation.counter(
    "gspo_tool_calls", "Tool calls by tool, and turns with malformed ones", ["tool", "result"]
)
TOOL_ERRORS = _generation.counter(
    "gspo_tool_errors",
    "Calls of an MCP server's tools with an error, no result in time, or one that was cut",
    ["tool", "kind"],
)

# Gateway
GATEWAY_ANSWERS = _gateway.counter("gspo_gateway_answers", "Answers to outside clients, by how they ended", ["end"])
GATEWAY_TOKENS = _gateway.counter("gspo_gateway_tokens", "Tokens sampled for outside clients")
GATEWAY_FIRST_TOKEN_SECONDS = _gateway.histogram(
    "gspo_gateway_first_token_seconds", "Time from a rendered request to its first tokens"
)
GATEWAY_GENERATORS_LOST = _gateway.counter(
    "gspo_gateway_generators_lost", "Answers continued by another generator, as theirs ended"
)
AGENT_BRANCHES = _gateway.counter(
    "gspo_agent_branches", "Requests of agents that begin a branch, since they continue no turn as it was"
)
AGENT_ROLLOUTS = _gateway.counter("gspo_agent_rollouts", "Rollouts that agents played, by how they ended", ["end"])
AGENT_LEASES_LOST = _gateway.counter("gspo_agent_leases_lost", "Rollouts whose agent was lost, or silent for too long")
AGENT_ROLLOUTS_OPEN = _gateway.gauge("gspo_agent_rollouts_open", "Rollouts that wait for an agent or are played")

# Agents
AGENT_SANDBOXES_PLAYING = _agents.gauge("gspo_agent_sandboxes_playing", "Sandboxes of agents that play a rollout")
AGENT_SANDBOXES_LOST = _agents.counter(
    "gspo_agent_sandboxes_lost", "Rollouts lost as the process that played them died"
)

# Reward
REWARD_CALLS = _reward.counter("gspo_reward_calls", "Calls of a reward function, by result", ["function", "result"])
REWARD_SECONDS = _reward.histogram("gspo_reward_seconds", "Time of one call of a reward function", ["function"])
SCORE_FAILURES = _reward.counter("gspo_score_failures", "Failed scores, by the kind of failure", ["kind"])
ROLLOUTS_SCORED = _reward.counter("gspo_rollouts_scored", "Rollouts scored, or failed", ["result"])
SCORE_QUEUE_SECONDS = _reward.histogram(
    "gspo_score_queue_seconds", "Time from the end of a rollout until a scorer takes it"
)
SANDBOX_LEVEL = _reward.gauge("gspo_sandbox_level", "Confinement level: 2 bubblewrap, 1 Landlock, 0 rlimits")

# Learner
STEP = _learner.gauge("gspo_step", "Steps trained")
STEP_TIMESTAMP = _learner.gauge(
    "gspo_step_timestamp_seconds", "Unix time of the end of the last step, or of the learner's readiness"
)
POLICY_VERSION = _learner.gauge("gspo_policy_version", "Newest policy version")
STEP_SECONDS = _learner.histogram("gspo_step_seconds", "Time of a step by phase", ["phase"])
STEP_TIME_SECONDS = _learner.counter("gspo_step_time_seconds", "Time of steps by cause", ["cause"])
for _cause in CAUSES:  # from zero, so that a rate sees the first step too
    STEP_TIME_SECONDS.labels(_cause)
STEP_FIGURE = _learner.gauge("gspo_step_figure", "Figures of the last step, as in its record", ["figure"])
SOURCE_FIGURE = _learner.gauge(
    "gspo_source_figure", "Figures of the last step by source of prompts, as in its record", ["source", "figure"]
)
TOKENS_TRAINED = _learner.counter("gspo_tokens_trained", "Policy tokens trained")
ROLLOUTS_TRAINED = _learner.counter("gspo_rollouts_trained", "Rollouts trained")
ROLLOUT_WAIT_SECONDS = _learner.histogram("gspo_rollout_wait_seconds", "Time from the score of a rollout to its step")
ROLLOUTS_SKIPPED = _learner.counter("gspo_rollouts_skipped", "Scored entries dropped at intake, by reason", ["reason"])
LEDGER_TOKENS = _learner.gauge(
    "gspo_ledger_tokens", "Tokens by the columns of the token ledger, since Redis last lost its data", ["column"]
)
LEDGER_DIFFERENCE = _learner.gauge("gspo_ledger_difference", "Generated tokens that no column of the ledger has")
STALE_TOKENS = _learner.counter("gspo_stale_tokens", "Stale policy tokens, masked or dropped with their group", ["how"])
STALE_WAIT_SECONDS = _learner.counter(
    "gspo_stale_wait_seconds", "Wait for groups that another version would make too old"
)
PUSH_SECONDS = _learner.histogram("gspo_push_seconds", "Time of one weight push to one generator", ["kind"])
PUSH_BYTES = _learner.counter("gspo_push_bytes", "Bytes of weights sent", ["kind"])
PUSH_FAILURES = _learner.counter("gspo_push_failures", "Weight pushes that failed, by gRPC status", ["status"])
GENERATORS = _learner.gauge("gspo_generators", "Registered generators by state: current, behind, out", ["state"])
CHECKPOINT_SECONDS = _learner.histogram("gspo_checkpoint_seconds", "Time until a checkpoint is whole")
DISK_FREE = _learner.gauge("gspo_disk_free_bytes", "Free space on the run directory's disk")
DISK_SIZE = _learner.gauge("gspo_disk_size_bytes", "Size of the run directory's disk")
TRACKER_UP = _learner.gauge("gspo_tracker_up", "1 while the tracker's process runs", ["tracker"])


def served_by(service: str) -> CollectorRegistry:
    """The metrics of a process of a service: the service's, those of every service, and the process's own."""
    served = CollectorRegistry()
    for registry in (SHARED, BY_SERVICE[service], REGISTRY):
        served.register(registry)
    return served
