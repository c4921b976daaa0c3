"""Writes the training groups to Redis: tasks, the `open` hash, failures, and their removal.

A task and its `open` entry are written in one transaction, so a group is in both or in neither, whenever this process
is killed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import structlog
from redis.asyncio import Redis

from gspo.common.config.schema import Config
from gspo.common.streams.entries import SCHEMA, saved_state
from gspo.common.streams.inbox import DONE, FIELD
from gspo.common.streams.keys import GENERATION, Keys, rollout_key
from gspo.common.telemetry import metrics
from gspo.coordinator.data.prompts import PromptSet
from gspo.coordinator.groups.order import PromptOrder
from gspo.coordinator.groups.slots import OpenGroup, Slots
from gspo.coordinator.groups.spans import GroupTraces
from gspo.coordinator.groups.tasks import training_task
from gspo.coordinator.redis_state import all_entries, readable
from gspo_proto.rollout_pb2 import GroupFailure, GroupTask, Prompt, Scored

log = structlog.get_logger()
# Groups that are read, prepared and written at a time: they bound a tick of the loop for any number of slots.
MOST_AT_ONCE = 1024
# Groups with their `open` entries and tasks. An entry is of one issue alone, so one that is there was written before.
_ISSUE = """
for i = 1, #ARGV, 3 do
  if redis.call('HGET', KEYS[2], ARGV[i]) ~= ARGV[i + 1] then
    redis.call('XADD', KEYS[1], '*', 'd', ARGV[i + 2])
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
  end
end
"""


class TaskWriter:
    """Writes the groups that `slots` allows.

    Args:
        redis: Client with binary replies.
        prompts: The usable training prompts.
        order: The prompt of each group.
        slots: Takes every issued group; so do `traces`.
    """

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        config: Config,
        prompts: PromptSet,
        order: PromptOrder,
        slots: Slots,
        traces: GroupTraces,
    ) -> None:
        self._redis, self._keys, self._config = redis, keys, config
        self._prompts, self._order, self._slots, self._traces = prompts, order, slots, traces
        self._prepared: dict[int, Prompt] = {}
        self._issue = redis.register_script(_ISSUE)

    async def read_open(self) -> None:
        """Take over the open groups of an earlier process."""
        for group, text in (await self._redis.hgetall(self._keys.open)).items():
            self._slots.issue(int(group), OpenGroup.from_json(text))

    async def issue_new(self, count: int) -> int:
        """Issue the next `count` groups, at most MOST_AT_ONCE, fewer where the order ends; returns how many."""
        groups = self._slots.upcoming(min(count, MOST_AT_ONCE))
        version = self._slots.issue_version
        entries = {group: self._entry(1, version) for group in groups}
        await self._write(entries)
        metrics.GROUPS_ISSUED.inc(len(groups))
        return len(groups)

    async def prepare(self, count: int) -> None:
        """Read and tokenise the prompts of the next groups, at most MOST_AT_ONCE, so that issuing is a transaction."""
        groups = self._slots.upcoming(min(count, MOST_AT_ONCE))
        self._prepared = {group: self._prepared[group] for group in groups if group in self._prepared}
        await self._read([group for group in groups if group not in self._prepared])

    async def reissue_open(self) -> None:
        """Issue every open group again at its own attempt: Redis lost them, and no attempt of theirs failed.

        Tasks issued between the wipe and its discovery are removed first. A second copy would write entries after its
        group is settled, and they would stay for ever. The learner may still train rollouts from before the wipe; the
        new task is removed then.
        """
        await self._remove_tasks(lambda group: group in self._slots.open)
        groups = iter(sorted(self._slots.open.items()))
        while part := list(islice(groups, MOST_AT_ONCE)):
            await self._write(
                {group: replace(self._entry(entry.attempt, entry.min_version), rewritten=True) for group, entry in part}
            )
            metrics.GROUPS_REISSUED.labels("redis_wiped").inc(len(part))

    async def handle_expired(self) -> None:
        """Extend, issue again or give up every group past its deadline.

        A group whose rollouts have grown gets another deadline; it can grow only so often, for its tokens are bounded.
        Another group is issued again, until its attempts are used up.
        """
        extended: dict[int, OpenGroup] = {}
        reissued: dict[int, OpenGroup] = {}
        given_up: dict[int, OpenGroup] = {}
        for group, progress in (await self._progress(self._slots.expired(time.time()))).items():
            entry = self._slots.open[group]
            if progress > entry.progress:
                later = time.time() + self._config.staleness.group_deadline_s
                extended[group] = replace(entry, deadline_unix_s=later, progress=progress)
            elif entry.attempt < self._config.staleness.max_attempts:
                reissued[group] = replace(self._entry(entry.attempt + 1, entry.min_version), progress=progress)
            else:
                given_up[group] = self._entry(entry.attempt, entry.min_version)
        if extended:
            await self._extend(extended)
        if reissued:
            log.warning("groups_reissued", groups=sorted(reissued), reason="deadline")
            await self._write(reissued)
            metrics.GROUPS_REISSUED.labels("deadline").inc(len(reissued))
        if given_up:
            await self._give_up(given_up)

    async def _progress(self, groups: Sequence[int]) -> dict[int, int]:
        """Saved tokens of each group's rollouts; a finished rollout counts more than the longest answer."""
        longest = self._config.algorithm.response_length + 1
        numbers = range(self._config.algorithm.num_return_sequences_in_group)
        progress = {}
        for group in groups:
            keys = [rollout_key(group, number) for number in numbers]
            states: Any = await self._redis.hmget(self._keys.partial, keys)
            progress[group] = sum(longest if state == DONE else _num_saved(state) for state in states)
        return progress

    async def _extend(self, entries: dict[int, OpenGroup]) -> None:
        await self._redis.hset(
            self._keys.open, mapping={str(group): entry.to_json() for group, entry in entries.items()}
        )
        for group, entry in entries.items():
            self._slots.issue(group, entry)
        metrics.GROUPS_EXTENDED.inc(len(entries))
        log.info("groups_extended", groups=sorted(entries), detail="past their deadline, with more tokens than before")

    async def remove_settled(self, groups: Iterable[int]) -> None:
        """Remove settled groups from `open`, and the keys and saved states of their rollouts."""
        groups = list(groups)
        if not groups:
            return
        numbers = range(self._config.algorithm.num_return_sequences_in_group)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hdel(self._keys.open, *(str(group) for group in groups))
            pipe.hdel(self._keys.partial, *(rollout_key(group, number) for group in groups for number in numbers))
            await pipe.execute()

    async def remove_leftover_tasks(self) -> None:
        """Remove the tasks of settled groups from their streams, also second copies."""
        await self._remove_tasks(lambda group: group in self._slots.settled)

    async def _remove_tasks(self, is_removed: Callable[[int], bool]) -> None:
        """Remove the tasks of some groups from their streams; a generator that works on one loses its lease."""
        for stream in (self._keys.prompts, self._keys.paused_prompts):
            entries = await all_entries(self._redis, stream)
            removed = [entry for entry, task in readable(GroupTask, entries) if is_removed(task.group)]
            if removed:
                async with self._redis.pipeline(transaction=True) as pipe:
                    pipe.xack(stream, GENERATION, *removed)
                    pipe.xdel(stream, *removed)
                    await pipe.execute()

    def _entry(self, attempt: int, min_version: int) -> OpenGroup:
        now = time.time()
        return OpenGroup(attempt, now, now + self._config.staleness.group_deadline_s, min_version)

    async def _write(self, entries: dict[int, OpenGroup]) -> None:
        """Add tasks and `open` entries in one transaction, each once, also when the connection breaks."""
        if not entries:
            return
        await self._read([group for group in entries if group not in self._prepared])
        args: list[str | bytes] = []
        for group, entry in entries.items():
            task = training_task(self._config, group, self._prepared.pop(group))
            task.attempt, task.min_version = entry.attempt, max(entry.min_version, self._slots.issue_version)
            task.issued_unix_s, task.deadline_unix_s = entry.issued_unix_s, entry.deadline_unix_s
            args += (str(group), entry.to_json(), task.SerializeToString())
        await self._issue(keys=[self._keys.prompts, self._keys.open], args=args)
        for group, entry in entries.items():
            self._slots.issue(group, entry)
        self._traces.issued(entries)

    async def _give_up(self, entries: dict[int, OpenGroup]) -> None:
        """Write a failure for each group; the learner settles it. Its new deadline only repeats the failure."""
        limit_s = self._config.staleness.group_deadline_s
        async with self._redis.pipeline(transaction=True) as pipe:
            for group, entry in entries.items():
                reason = f"not finished within {limit_s:g} s in any of {entry.attempt} attempts"
                failure = GroupFailure(group=group, attempt=entry.attempt, reason=reason)
                pipe.xadd(self._keys.scored, {FIELD: Scored(schema=SCHEMA, failure=failure).SerializeToString()})
                pipe.hset(self._keys.open, str(group), entry.to_json())
            await pipe.execute()
        for group, entry in entries.items():
            self._slots.issue(group, entry)
        log.warning("groups_given_up", groups=sorted(entries), attempts=self._config.staleness.max_attempts)

    async def _read(self, groups: Sequence[int]) -> None:
        """Read prompts in a thread: a slow disk must not delay the events."""
        if groups:
            places = [self._order.place(group) for group in groups]
            prompts = await asyncio.to_thread(self._prompts.prompts, places)
            self._prepared.update(zip(groups, prompts, strict=True))


def _num_saved(state: bytes | None) -> int:
    """Tokens in the saved state of a rollout."""
    saved = saved_state(state)
    return len(saved.token_ids) if saved else 0
