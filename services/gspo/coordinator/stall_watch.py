"""Notices that nothing moves: every service waits, and none can end the wait of another.

waits for: nothing; the coordinator's loop looks once a second. Each service says in its heartbeat what it waits for.
Only waits that another service of the run ends are counted: a user's pause, a user's agents and servers, a full disk
and an evaluation have other ends. Tokens, bytes, steps and entries that move count as work.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Literal

from redis.asyncio import Redis

from gspo.common.config.schema import Config
from gspo.common.streams.instances import Instance, list_instances
from gspo.common.streams.keys import (
    AGENTS,
    COORDINATOR,
    GATEWAY,
    GENERATION,
    LEARNER,
    REWARD,
    Keys,
)
from gspo.coordinator.groups.slots import Slots

Remedy = Literal["issue again", "end"]
# Waits that only another service of the run can end.
_WAITS = {
    COORDINATOR: {"slots", "last groups", "learner"},
    GENERATION: {"prompts", "weights", "gpus", "requests"},
    GATEWAY: {"prompts", "requests"},
    AGENTS: {"rollouts"},
    REWARD: {"rollouts"},
    LEARNER: {"rollouts"},
}
# The longest pause between two pushes to a generator that fail: it may be the wait's end.
_LEAST_LIMIT_S = 30.0
# Longest time that counts between two looks: more has passed where Redis did not answer or this machine was asleep.
_LONGEST_LOOK_S = 2.0


class StallClock:
    """Counts the time in which nothing has moved, and says what to do.

    Args:
        limit_s: After so long the open groups are issued again; after so long again the run ends, unless a group was
            settled or a version became live in between.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._still_s, self._looked_s = 0.0, 0.0
        self._moved: Hashable = None
        self._done: Hashable = None
        self._is_issued_again = False

    def look(self, now_s: float, *, all_wait: bool, moved: Hashable, done: Hashable) -> Remedy | None:
        """The remedy that is due; None while something moves.

        Args:
            now_s: By time.monotonic.
            all_wait: Whether every service waits for another.
            moved: Changes with everything that moves: entries, tokens, bytes.
            done: Changes when a group is settled or a version becomes live.
        """
        passed_s, self._looked_s = min(now_s - self._looked_s, _LONGEST_LOOK_S), now_s
        if done != self._done:
            self._done, self._is_issued_again = done, False
        if not all_wait or moved != self._moved:
            self._moved, self._still_s = moved, 0.0
            return None
        self._still_s += passed_s
        if self._still_s < self.limit_s:
            return None
        self._still_s = 0.0
        if self._is_issued_again:
            return "end"
        self._is_issued_again = True
        return "issue again"


class StallWatch:
    """Looks at every service of a run and at Redis.

    Attributes:
        chain: The wait of each service at the last look.
    """

    def __init__(self, redis: Redis, keys: Keys, config: Config) -> None:
        self._redis, self._keys, self._with_agents = redis, keys, config.agent.used
        self.clock = StallClock(max(config.services.lease_s, _LEAST_LIMIT_S))
        self.chain = ""

    async def look(self, now_s: float, own_wait: tuple[str, str], slots: Slots) -> Remedy | None:
        """The remedy that is due; None while something moves.

        Args:
            now_s: By time.monotonic.
            own_wait: The coordinator's: a bounded name and its completion.
        """
        instances = await list_instances(self._redis, self._keys)
        all_wait = own_wait[0] in _WAITS[COORDINATOR] and every_service_waits(instances, with_agents=self._with_agents)
        self.chain = in_words(instances, own_wait)
        done = (slots.version, slots.live_version, len(slots.settled))
        received = tuple((each.uid, each.facts.get("num_frames"), each.facts.get("version")) for each in instances)
        moved = (done, len(slots.open), received, await self._in_redis())
        return self.clock.look(now_s, all_wait=all_wait, moved=moved, done=done)

    async def _in_redis(self) -> Hashable:
        """How far the results have come in their streams, and the counted tokens.

        Not the tasks: a generator with old weights takes one and returns it, again and again.
        """
        keys = self._keys
        async with self._redis.pipeline(transaction=False) as pipe:
            for stream in (keys.rollouts, keys.scored, keys.eval_rollouts, keys.eval_scored):
                pipe.xinfo_groups(stream)
                pipe.xlen(stream)
            pipe.xlen(keys.dead)
            pipe.hgetall(keys.tokens)
            return repr(await pipe.execute(raise_on_error=False))


def every_service_waits(instances: Iterable[Instance], *, with_agents: bool = False) -> bool:
    """Whether the services that a run needs are registered, and each process waits for another service.

    Args:
        with_agents: Whether agents play the rollouts: gateways and the run's agents then count too.
    """
    needed = {GENERATION, REWARD, LEARNER} | ({GATEWAY} if with_agents else set())
    counted = needed | ({AGENTS} if with_agents else set())
    chosen = [instance for instance in instances if instance.service in counted]
    return needed <= {instance.service for instance in chosen} and all(map(_waits, chosen))


def _waits(instance: Instance) -> bool:
    activity, facts = instance.activity, instance.facts
    works = facts.get("takes_weights") or facts.get("works_beside")
    is_waiting = activity.get("kind") == "waiting" and activity.get("what") in _WAITS[instance.service]
    return is_waiting and not works


def in_words(instances: Sequence[Instance], own_wait: tuple[str, str]) -> str:
    """The chain of waits, from the learner back to the coordinator."""
    order = (LEARNER, REWARD, AGENTS, GATEWAY, GENERATION)
    links = [
        f"{instance.name} waits for {_words(instance.activity)}"
        for service in order
        for instance in instances
        if instance.service == service
    ]
    what, detail = own_wait
    return " <- ".join([*links, f"coordinator waits for {what} {detail}"])


def _words(activity: dict[str, Any]) -> str:
    return " ".join(filter(None, (activity.get("what"), activity.get("detail"))))
