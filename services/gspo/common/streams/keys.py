"""Every name in Redis, and its expiry.

Nothing here talks to Redis. The braces put all keys of a run into one hash slot, so that transactions and scripts
also work on a Redis Cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

# An instance that stops its heartbeat is forgotten after this; three beats may be lost.
INSTANCE_TTL_S = 6
HEARTBEAT_S = 1.5
# Events are read by position and never acknowledged, so trimming them loses no pending entry.
EVENTS_KEPT = 10_000
# The value of `paused` where a user asked for the pause.
PAUSED_BY_USER = b"1"


@dataclass(frozen=True)
class Keys:
    """The keys of one run."""

    run: str

    def _key(self, name: str) -> str:
        return f"gspo:{{{self.run}}}:{name}"

    @property
    def prompts(self) -> str:
        """Stream of GroupTask: coordinator to generation."""
        return self._key("prompts")

    @property
    def paused_prompts(self) -> str:
        """Stream of GroupTask whose rollouts have used up their tokens of a step: generation to generation."""
        return self._key("paused_prompts")

    @property
    def rollouts(self) -> str:
        """Stream of Rollout: generation to reward."""
        return self._key("rollouts")

    @property
    def scored(self) -> str:
        """Stream of Scored: reward, or the service that gives a group up, to the learner."""
        return self._key("scored")

    @property
    def eval_prompts(self) -> str:
        """Stream of GroupTask: coordinator to generation, after training work."""
        return self._key("eval_prompts")

    @property
    def eval_rollouts(self) -> str:
        """Stream of Rollout: generation to reward."""
        return self._key("eval_rollouts")

    @property
    def eval_scored(self) -> str:
        """Stream of Scored: reward to coordinator."""
        return self._key("eval_scored")

    def stream(self, name: str) -> str:
        """A stream by its name without the prefix."""
        return self._key(name)

    @property
    def dead(self) -> str:
        """Stream of DeadLetter: entries that were given up, with the reason."""
        return self._key("dead")

    @property
    def events(self) -> str:
        """Stream of Event: read by everyone who watches."""
        return self._key("events")

    @property
    def partial(self) -> str:
        """Hash `group-number` -> the saved state of a rollout in flight, or `done`; removed with its group."""
        return self._key("partial")

    @property
    def open(self) -> str:
        """Hash `group` -> OpenGroup as JSON: issued and not settled."""
        return self._key("open")

    @property
    def redis_epoch(self) -> str:
        """A random value: absent or changed means that Redis was wiped."""
        return self._key("redis_epoch")

    @property
    def instances(self) -> str:
        """Set of `service:uid` of every process that has registered."""
        return self._key("instances")

    def instance(self, service: str, uid: str) -> str:
        """Heartbeat of one process, as JSON; expires after INSTANCE_TTL_S."""
        return self._key(f"instance:{service}:{uid}")

    @property
    def paused(self) -> str:
        """Present while the issue of new groups is paused: PAUSED_BY_USER, or why."""
        return self._key("paused")


# Consumer group of each stream: the service that reads it.
GENERATION, REWARD, LEARNER, COORDINATOR = "generation", "reward", "learner", "coordinator"
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
