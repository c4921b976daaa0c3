"""Issues the groups of a run and settles them: tasks, the `open` hash, failures, traces, and their removal.

A task and its field of `open` are written in one transaction: whenever this process is killed, a group is in both or in
neither. The rules of the slots are in slots.py.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import structlog

from gspo.common.host.steady_clock import steady_unix_s
from gspo.common.service.app import Service
from gspo.common.service.traces import Traces
from gspo.common.streams.entries import SCHEMA, saved_state, word_of
from gspo.common.streams.inbox import FIELD
from gspo.common.streams.keys import GENERATION, rollout_key
from gspo.common.streams.saved_states import DONE, load_states
from gspo.common.streams.token_counts import abandon, num_sampled
from gspo.common.telemetry import metrics
from gspo.coordinator.data.prompts import PromptSet
from gspo.coordinator.feed import LearnerResults
from gspo.coordinator.groups.slots import TRAINED, OpenGroup, Slots
from gspo.coordinator.groups.tasks import TrainingTasks
from gspo.coordinator.redis_state import all_entries, readable
from gspo_proto.learner_pb2 import ProgressReply
from gspo_proto.rollout_pb2 import GroupFailure, GroupTask, Scored, SettledGroup, Settlement, StepDone

log = structlog.get_logger()
# Groups that are read, prepared and written at a time: they bound a tick of the loop for any number of slots.
MOST_AT_ONCE = 1024
# ARGV: group, open group and task in threes. The open group has the time of its issue, so an equal one was written by
# this call: the client repeats a call whose connection broke.
_ISSUE = """
for i = 1, #ARGV, 3 do
  if redis.call('HGET', KEYS[2], ARGV[i]) ~= ARGV[i + 1] then
    redis.call('XADD', KEYS[1], '*', 'd', ARGV[i + 2])
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
  end
end
"""


class GroupLedger:
    """The groups of a run, from their issue to the removal of all that Redis has of them.

    Args:
        prompts: The usable training prompts of each source.

    Attributes:
        slots: The open and the settled groups.
        order: The prompt of each group.
        lacks_results: Whether groups are not issued because results of others are missing, which decide their prompts.
    """

    def __init__(self, service: Service, prompts: Sequence[PromptSet]) -> None:
        config, algorithm = service.config, service.config.algorithm
        self._redis, self._keys, self._config = service.redis, service.keys, config
        self._tasks, self._results = TrainingTasks(config, prompts), LearnerResults(service)
        self.order, self.lacks_results = self._tasks.order, False
        self.slots = Slots(config.num_slots, algorithm.rollout_batch_size, self.order.num_groups)
        self._numbers = range(algorithm.num_return_sequences_in_group)
        self._spans = _GroupSpans(service.traces, self._numbers)
        self._issue_script = self._redis.register_script(_ISSUE)
        # Settled groups of which Redis still has something, and whether tasks of settled groups may be in the streams:
        # an earlier process may have left some.
        self._to_remove: list[int] = []
        self._may_have_tasks = True
        metrics.SLOTS.set(self.slots.num_slots)

    async def read_open(self) -> None:
        """Take over the open groups of an earlier process; no deadline is further off than that of a new group."""
        latest = steady_unix_s() + self._config.staleness.group_deadline_s
        for group, text in (await self._redis.hgetall(self._keys.open)).items():
            earlier = OpenGroup.from_json(text)
            self.slots.open[int(group)] = replace(earlier, deadline_unix_s=min(earlier.deadline_unix_s, latest))

    async def issue(self, count: int) -> int:
        """Issue the next `count` groups, at most MOST_AT_ONCE, fewer where the order ends; returns how many."""
        groups = self.slots.upcoming(min(count, MOST_AT_ONCE))
        num_written = await self._write({group: self._open_group(1, self.slots.issue_version) for group in groups})
        self.lacks_results = num_written < len(groups)
        metrics.GROUPS_ISSUED.inc(num_written)
        return num_written

    async def prepare(self, count: int) -> None:
        """Read and tokenise the prompts of the next groups, at most MOST_AT_ONCE, so that issuing is a transaction."""
        await self._tasks.prepare(await self._decided(self.slots.upcoming(min(count, MOST_AT_ONCE))))

    async def reissue_open(self, reason: str) -> None:
        """Issue every open group again at its own attempt: Redis lost them, and no attempt of theirs failed.

        Tasks that are still there are removed first. A second copy would write entries after its group is settled, and
        they would stay for ever. Finished rollouts are made again, for their entries may be lost. The learner may still
        train those from before; the new task is removed then.

        Args:
            reason: A bounded name for the metric.
        """
        await self._remove_tasks(lambda group: group in self.slots.open)
        groups = iter(sorted(self.slots.open.items()))
        while part := list(islice(groups, MOST_AT_ONCE)):
            await self._forget_finished(group for group, _ in part)
            num_written = await self._write(
                {group: self._open_group(old.attempt, old.min_version) for group, old in part}
            )
            metrics.GROUPS_REISSUED.labels(reason).inc(num_written)

    async def _forget_finished(self, groups: Iterable[int]) -> None:
        """Have the finished rollouts of some groups made again; unfinished ones continue from their saved states."""
        keys = [rollout_key(group, number) for group in groups for number in self._numbers]
        states: Any = await self._redis.hmget(self._keys.partial, keys)
        if finished := [key for key, state in zip(keys, states, strict=True) if state == DONE]:
            await self._redis.hdel(self._keys.partial, *finished)

    async def handle_expired(self) -> None:
        """Extend, issue again or give up every group past its deadline.

        A group whose rollouts have grown gets another deadline; it can grow only so often, for its tokens are bounded.
        Another group is issued again, until its attempts are used up. At most MOST_AT_ONCE groups, the oldest; the next
        call takes more.
        """
        limits = self._config.staleness
        extended: dict[int, OpenGroup] = {}
        reissued: dict[int, OpenGroup] = {}
        given_up: dict[int, OpenGroup] = {}
        for group in self.slots.expired(steady_unix_s())[:MOST_AT_ONCE]:
            open_group, progress = self.slots.open[group], await self._progress(group)
            if progress > open_group.progress:
                later = steady_unix_s() + limits.group_deadline_s
                extended[group] = replace(open_group, deadline_unix_s=later, progress=progress)
            elif open_group.attempt < limits.max_attempts:
                reissued[group] = replace(
                    self._open_group(open_group.attempt + 1, open_group.min_version), progress=progress
                )
            else:
                given_up[group] = self._open_group(open_group.attempt, open_group.min_version)
        if extended:
            await self._postpone(extended)
            metrics.GROUPS_EXTENDED.inc(len(extended))
            log.info(
                "groups_extended", groups=sorted(extended), detail="past their deadline, with more tokens than before"
            )
        if reissued:
            log.warning("groups_reissued", groups=sorted(reissued), reason="deadline")
            metrics.GROUPS_REISSUED.labels("deadline").inc(await self._write(reissued))
        if given_up:
            # The learner settles them by these failures. A new deadline only repeats the failure.
            reason = f"not finished within {limits.group_deadline_s:g} s in any of"
            failures = [
                GroupFailure(group=group, attempt=last.attempt, reason=f"{reason} {last.attempt} attempts")
                for group, last in given_up.items()
            ]
            await self._postpone(given_up, failures)
            log.warning("groups_given_up", groups=sorted(given_up), attempts=limits.max_attempts)

    def on_step(self, step: StepDone) -> None:
        """The groups of a step are trained."""
        groups = self.slots.settle_trained(step.groups, step.version)
        self._spans.trained(groups, step.version)
        self._settle(groups, TRAINED)

    def on_settled(self, groups: Iterable[SettledGroup]) -> None:
        """Groups ended without being trained."""
        for group in groups:
            settlement = word_of(Settlement, group.settlement)
            settled = self.slots.settle([group.group], settlement)
            self._spans.ended(settled, settlement)
            self._settle(settled, settlement)

    def on_live(self, version: int) -> None:
        """A generator serves a version."""
        self.slots.go_live(version)
        self._spans.live(version)

    def on_progress(self, reply: ProgressReply) -> None:
        """Take over the learner's own account, which includes settlements whose events were lost."""
        ranges = [(part.first, part.last) for part in reply.settled]
        groups = self.slots.reconcile(ranges, reply.version, reply.live_version, dict(reply.counts))
        self._spans.ended(groups, "reconciled")
        self._to_remove += groups

    def _settle(self, groups: list[int], settlement: str) -> None:
        metrics.GROUPS_SETTLED.labels(settlement).inc(len(groups))
        self._to_remove += groups

    async def remove_settled(self) -> None:
        """Remove what Redis still has of settled groups: tasks, fields of `open`, keys and saved states of rollouts."""
        groups, self._to_remove = self._to_remove, []
        if not (groups or self._may_have_tasks):
            return
        # The tasks first, also of trained groups: a generator with such a task could save a rollout under a key that
        # was removed already. It has one where the reply to its last write was lost, and the write is made again.
        self._may_have_tasks = False
        await self._remove_tasks(lambda group: group in self.slots.settled)
        if not groups:
            return
        keys = [rollout_key(group, number) for group in groups for number in self._numbers]
        await self._abandon(keys)
        await self._redis.hdel(self._keys.open, *(str(group) for group in groups))
        # From now on the gateways refuse turns of the groups, and generators put no task of theirs back. Meanwhile a
        # turn may have been written, and a task that was put back has not been seen above.
        was_put_back = await self._remove_tasks(lambda group: group in self.slots.settled)
        if was_put_back or self._config.agent.used:
            await self._abandon(keys)

    async def _abandon(self, keys: Sequence[str]) -> None:
        """Remove the keys and saved states of rollouts; their tokens are counted as unfinished."""
        states = await load_states(self._redis, self._keys, keys)
        tokens = [num_sampled(saved.version) if (saved := saved_state(state)) else None for state in states]
        await abandon(self._redis, self._keys, list(zip(keys, tokens, strict=True)))

    async def _remove_tasks(self, is_removed: Callable[[int], bool]) -> bool:
        """Remove the tasks of some groups from their streams; a generator that works on one loses its lease.

        Returns:
            Whether there were any.
        """
        num_removed = 0
        for stream in (self._keys.prompts, self._keys.paused_prompts):
            entries = await all_entries(self._redis, stream)
            removed = [entry for entry, task in readable(GroupTask, entries) if is_removed(task.group)]
            num_removed += len(removed)
            if removed:
                async with self._redis.pipeline(transaction=True) as pipe:
                    pipe.xack(stream, GENERATION, *removed)
                    pipe.xdel(stream, *removed)
                    await pipe.execute()
        return num_removed > 0

    async def _progress(self, group: int) -> int:
        """Saved tokens of a group's rollouts; a finished rollout counts more than the longest answer."""
        states = await load_states(self._redis, self._keys, [rollout_key(group, number) for number in self._numbers])
        longest = self._config.algorithm.longest_answer + 1
        saved = [rollout for state in states if (rollout := saved_state(state))]
        return longest * int(states.count(DONE)) + sum(len(rollout.token_ids) for rollout in saved)

    def _open_group(self, attempt: int, min_version: int) -> OpenGroup:
        deadline_s = steady_unix_s() + self._config.staleness.group_deadline_s
        return OpenGroup(attempt, time.time(), deadline_s, min_version)

    async def _decided(self, groups: Iterable[int]) -> list[int]:
        """Those of the groups whose prompts follow from results that the learner has sent; asks it for more."""
        groups, order = sorted(groups), self.order
        most = order.needs(groups[-1]) if groups else 0
        while order.num_results < most and (page := await self._results.read(order.num_results)):
            order.learn(page)
        return [group for group in groups if order.needs(group) <= order.num_results]

    async def _write(self, groups: dict[int, OpenGroup]) -> int:
        """Add tasks and fields of `open` in one transaction, each once, also when the connection breaks.

        Returns how many: a group whose prompt is not decided yet is left out, and its deadline stays.
        """
        groups = {group: groups[group] for group in await self._decided(groups)}
        if not groups:
            return 0
        tasks = await self._tasks.make(groups)
        args: list[str | bytes] = []
        for group, open_group in groups.items():
            task = tasks[group]
            task.attempt, task.min_version = open_group.attempt, max(open_group.min_version, self.slots.issue_version)
            task.issued_unix_s, task.deadline_unix_s = open_group.issued_unix_s, open_group.deadline_unix_s
            args += (str(group), open_group.to_json(), task.SerializeToString())
        await self._issue_script(keys=[self._keys.prompts, self._keys.open], args=args)
        self.slots.open |= groups
        self._spans.issued(groups)
        return len(groups)

    def close(self) -> None:
        """Give up the call in flight."""
        self._results.cancel()

    async def _postpone(self, groups: dict[int, OpenGroup], failures: Sequence[GroupFailure] = ()) -> None:
        """Give groups another deadline, and write failures for the learner in the same transaction."""
        async with self._redis.pipeline(transaction=True) as pipe:
            for failure in failures:
                pipe.xadd(self._keys.scored, {FIELD: Scored(schema=SCHEMA, failure=failure).SerializeToString()})
            pipe.hset(
                self._keys.open, mapping={str(group): open_group.to_json() for group, open_group in groups.items()}
            )
            await pipe.execute()
        self.slots.open |= groups


class _GroupSpans:
    """The root span of each rollout's trace, from the issue of its group to its end, and the span of its prompt.

    Only the coordinator sees both ends. Empty where traces are off.

    Args:
        numbers: Places of rollouts in their group.
    """

    def __init__(self, traces: Traces, numbers: range) -> None:
        self._traces, self._numbers = traces, numbers
        self._issued: dict[int, float] = {}
        self._not_live: dict[int, list[int]] = defaultdict(list)
        self._live_version = -1

    def issued(self, groups: Mapping[int, OpenGroup]) -> None:
        """Groups were written, for the first time or again; the prompt's span ends now."""
        if not self._traces.on:
            return
        now = time.time()
        for group, open_group in groups.items():
            issued_unix_s = open_group.issued_unix_s
            self._issued.setdefault(group, issued_unix_s)
            for number in self._numbers:
                self._traces.add("prompt", group, number, issued_unix_s, now, attempt=open_group.attempt)

    def trained(self, groups: Iterable[int], version: int) -> None:
        """Groups are in the step that made `version`. They end when it is live, and that event may come first."""
        self._not_live[version] += [group for group in groups if group in self._issued]
        self.live(self._live_version)

    def live(self, version: int) -> None:
        self._live_version = version
        for served in [trained for trained in self._not_live if trained <= version]:
            self.ended(self._not_live.pop(served), TRAINED)

    def ended(self, groups: Iterable[int], settlement: str) -> None:
        now = time.time()
        for group in groups:
            if (began := self._issued.pop(group, None)) is not None:
                for number in self._numbers:
                    self._traces.add("rollout", group, number, began, now, is_root=True, settlement=settlement)
