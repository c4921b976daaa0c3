"""Every metric of every service, declared once.

It serves nothing: probes.py does. Base units, `_total` for counters, bounded labels (never a group, rollout or
prompt). Neighbours: activity.py for busy and waiting time.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

# Every service
ACTIVITY_SECONDS = Counter("gspo_activity_seconds", "Time by what the service was doing", ["service", "kind", "what"])
BUILD_INFO = Gauge("gspo_build_info", "1, with the version of gspo as label", ["service", "version"])

# Coordinator
GROUPS_ISSUED = Counter("gspo_groups_issued", "Groups issued, repeats not counted")
GROUPS_REISSUED = Counter("gspo_groups_reissued", "Groups issued again, by reason", ["reason"])
GROUPS_OPEN = Gauge("gspo_groups_open", "Groups issued and not settled")
SLOTS = Gauge("gspo_slots", "Groups that may be open at a time")
GROUPS_SETTLED = Counter("gspo_groups_settled", "Groups by how they ended", ["settlement"])
EVALUATION_FIGURE = Gauge(
    "gspo_evaluation_figure", "Figures of the last evaluation on a held-out file, as in its record", ["file", "figure"]
)
EVALUATION_VERSION = Gauge("gspo_evaluation_version", "Policy version of the last evaluation", ["file"])
STREAM_ENTRIES = Gauge("gspo_stream_entries", "Entries in a Redis stream", ["stream"])

# Generation
ROLLOUTS_GENERATED = Counter("gspo_rollouts_generated", "Rollouts finished, by outcome", ["outcome", "evaluation"])
TOKENS_GENERATED = Counter("gspo_tokens_generated", "Policy tokens sampled", ["evaluation"])
ROLLOUTS_SAVED = Counter("gspo_rollouts_saved", "Times that a rollout under way was saved")
ROLLOUTS_RESUMED = Counter("gspo_rollouts_resumed", "Rollouts gone on with from what was saved of them")
ROLLOUTS_PUT_ASIDE = Counter("gspo_rollouts_put_aside", "Times that a rollout had to wait for a later step")
TOKENS_RESTARTED = Counter("gspo_tokens_restarted", "Policy tokens dropped because the weights changed under them")
ROLLOUTS_RUNNING = Gauge("gspo_rollouts_running", "Rollouts under way in the engine")
ROLLOUT_SECONDS = Histogram("gspo_rollout_seconds", "From start to end of one rollout", buckets=_LATENCY)
RESPONSE_TOKENS = Histogram("gspo_response_tokens", "Policy tokens of one rollout", buckets=_TOKENS)
GENERATOR_VERSION = Gauge("gspo_generator_version", "Policy version that the engine serves")
PUSH_PAUSE_SECONDS = Histogram("gspo_push_pause_seconds", "Time generation stood still for a push", buckets=_LATENCY)
PUSHES_RECEIVED = Counter("gspo_pushes_received", "Weight pushes by result", ["result"])

# Reward
REWARD_CALLS = Counter("gspo_reward_calls", "Calls of a reward function, by result", ["function", "result"])
REWARD_SECONDS = Histogram(
    "gspo_reward_seconds", "Time of one call of a reward function", ["function"], buckets=_LATENCY
)
SCORE_FAILURES = Counter("gspo_score_failures", "Failed scores, by the kind of failure", ["kind"])
ROLLOUTS_SCORED = Counter("gspo_rollouts_scored", "Rollouts scored, or failed", ["result"])

# Learner
STEP = Gauge("gspo_step", "Steps trained")
POLICY_VERSION = Gauge("gspo_policy_version", "Newest policy version")
STEP_SECONDS = Histogram("gspo_step_seconds", "Time of a step by phase", ["phase"], buckets=_LATENCY)
STEP_FIGURE = Gauge("gspo_step_figure", "Figures of the last step, as in its record", ["figure"])
TOKENS_TRAINED = Counter("gspo_tokens_trained", "Policy tokens trained on")
ROLLOUTS_TRAINED = Counter("gspo_rollouts_trained", "Rollouts trained on")
ROLLOUTS_SKIPPED = Counter("gspo_rollouts_skipped", "Rollouts that came and were not trained on", ["reason"])
PUSH_SECONDS = Histogram("gspo_push_seconds", "Time of one weight push to one generator", ["kind"], buckets=_LATENCY)
PUSH_BYTES = Counter("gspo_push_bytes", "Bytes of weights sent", ["kind"])
PUSH_FAILURES = Counter("gspo_push_failures", "Weight pushes that failed, by gRPC status", ["status"])
GENERATORS = Gauge("gspo_generators", "Registered generators by state: current, behind, out", ["state"])
CHECKPOINT_SECONDS = Histogram("gspo_checkpoint_seconds", "Time to write a checkpoint", buckets=_LATENCY)
TRACKER_UP = Gauge("gspo_tracker_up", "1 while the process that feeds a tracker runs", ["tracker"])
