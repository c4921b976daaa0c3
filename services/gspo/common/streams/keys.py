"""Every name of a run in Redis, and its expiry.

Nothing here talks to Redis. The braces put all keys of a run into one hash slot, so that transactions and scripts
also work on a Redis Cluster.
"""

# An instance that stops its heartbeat is forgotten after this; three beats may be lost.
INSTANCE_TTL_S = 6
HEARTBEAT_S = 1.5
# Events are read by position and never acknowledged, so trimming them loses no pending entry.
EVENTS_KEPT = 10_000
# The value of `paused` where a user asked for the pause.
PAUSED_BY_USER = b"1"


class Keys:
    """The keys of one run.

    Attributes:
        prompts: Stream of GroupTask: coordinator to generation.
        paused_prompts: Stream of GroupTask with rollouts that have used up a version's tokens: to generation again.
        rollouts: Stream of Rollout: generation to reward.
        scored: Stream of Scored: reward, or the service that gives a group up, to the learner.
        eval_prompts: Stream of GroupTask: coordinator to generation, after training work.
        eval_rollouts: Stream of Rollout: generation to reward.
        eval_scored: Stream of Scored: reward to coordinator.
        dead: Stream of DeadLetter: entries that were given up, with the reason.
        events: Stream of Event: read by everyone who watches.
        partial: Hash `group-number` -> the saved state of a rollout in flight, or `done`; removed with its group.
        pieces: Prefix of the list of pieces behind a rollout's saved state (saved_states.py).
        open: Hash `group` -> OpenGroup as JSON: issued and not settled.
        tokens: Hash `column` -> tokens: the token ledger (token_counts.py).
        rollout_tokens: Hash `group-number` -> tokens of a rollout by its generator, until they are in a column.
        redis_epoch: A random value: absent or changed means that Redis was wiped.
        instances: Set of `service:uid` of every process that has registered.
        shift: Hash of the shift on shared GPUs: whether the generators or the learner have them (gpu_shift.py).
        gpu_engines: Hash of a generator's uid -> the record of its engine on shared GPUs (gpu_engines.py).
        agent_tasks: Stream of the names of rollouts that agents play (gateway/sessions/session_store.py).
        scale: List of requests to change the number of a service's processes: `gspo scale` to `gspo run`.
        paused: Present while the issue of new groups is paused: PAUSED_BY_USER, or why.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.prompts, self.paused_prompts = self.key("prompts"), self.key("paused_prompts")
        self.rollouts, self.scored = self.key("rollouts"), self.key("scored")
        self.eval_prompts, self.eval_rollouts = self.key("eval_prompts"), self.key("eval_rollouts")
        self.eval_scored = self.key("eval_scored")
        self.dead, self.events = self.key("dead"), self.key("events")
        self.partial, self.pieces, self.open = self.key("partial"), self.key("pieces:"), self.key("open")
        self.tokens, self.rollout_tokens = self.key("tokens"), self.key("rollout_tokens")
        self.shift, self.gpu_engines = self.key("shift"), self.key("gpu_engines")
        self.agent_tasks, self.scale = self.key("agent_tasks"), self.key("scale")
        self.redis_epoch, self.instances, self.paused = (
            self.key("redis_epoch"),
            self.key("instances"),
            self.key("paused"),
        )

    def key(self, name: str) -> str:
        """A key by its name without the prefix of the run."""
        return f"gspo:{{{self.run}}}:{name}"

    def instance(self, service: str, uid: str) -> str:
        """Heartbeat of one process, as JSON; expires after INSTANCE_TTL_S."""
        return self.key(f"instance:{service}:{uid}")


# Consumer group of each stream: the service that reads it.
GENERATION, REWARD, LEARNER, COORDINATOR = "generation", "reward", "learner", "coordinator"
# They read no stream.
GATEWAY, AGENTS = "gateway", "agents"
# In the order of the data flow, which is also the order on the terminal.
SERVICES = (COORDINATOR, GENERATION, REWARD, LEARNER)


def consumer_groups(keys: Keys) -> dict[str, str]:
    """Stream -> the consumer group that reads it."""
    return {
        keys.prompts: GENERATION,
        keys.paused_prompts: GENERATION,
        keys.eval_prompts: GENERATION,
        keys.rollouts: REWARD,
        keys.eval_rollouts: REWARD,
        keys.scored: LEARNER,
        keys.eval_scored: COORDINATOR,
    }


def rollout_key(group: int, number: int, evaluation: str = "") -> str:
    """The name of a rollout, in `partial` too: its group and its number in it, after the label of an evaluation."""
    key = f"{group}-{number}"
    return f"{evaluation}:{key}" if evaluation else key


def evaluation_label(version: int, file: str = "") -> str:
    """The name of an evaluation of a version on a held-out file."""
    return f"v{version}/{file}" if file else f"v{version}"
