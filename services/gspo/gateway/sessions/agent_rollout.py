"""A finished session as a rollout: its branches one after another, each sampled token in one of them."""

import json
import time
from collections.abc import Sequence

from gspo.common.streams.entries import MAX_ENTRY_BYTES, SAMPLED, SCHEMA, append_context, append_sampled
from gspo.gateway.sessions.session_store import Session
from gspo.gateway.sessions.turns import Conversation, Message, RecordedTurn
from gspo_proto import rollout_pb2
from gspo_proto.agent_pb2 import AgentResult
from gspo_proto.rollout_pb2 import Episode, Outcome, Prompt, Rollout

# A rollout without a turn has nothing to train on, and no reward can be of the policy.
NO_TURN = "no_turn"
TOO_LONG = "too_long"


def agent_rollout(
    session: Session, conversation: Conversation, result: AgentResult, worker: str, most_tokens: int
) -> Rollout:
    """The message for the stream `rollouts`.

    Turns that were cancelled before their end are left out: the agent did not read them to the end.

    Args:
        worker: The worker that played it.
        most_tokens: Limit of all branches together. Requests side by side may use more: the rollout then fails.
    """
    task, branches = session.task, conversation.branches()
    failure = _failure(result, branches)
    rollout = Rollout(
        schema=SCHEMA,
        group=task.group,
        number=session.number,
        attempt=task.attempt,
        num_rollouts=task.num_rollouts,
        prompt=task.prompt,
        outcome=_outcome(failure, branches),
        rewards=task.rewards,
        environment=task.environment,
        num_turns=max(1, sum(1 for _ in conversation.finished)),
        generator=worker,
        evaluation=task.evaluation,
        issued_unix_s=task.issued_unix_s,
        started_unix_s=session.began_unix_s,
        finished_unix_s=time.time(),
        temperature=task.sampling.temperature if session.temperature is None else session.temperature,
        episode=Episode(reward=result.reward, failure_kind=failure[0], failure=failure[1]),
    )
    if branches:
        rollout.prompt.CopyFrom(_prompt(branches[0][0], task.prompt))
        _add_tokens(rollout, branches, keep_sets=task.sampling.keep_sets)
        rollout.episode.turns_json, rollout.text = _messages(branches[0])
        if (num := len(rollout.prompt.token_ids) + len(rollout.token_ids)) > most_tokens:
            return _too_long(rollout, f"its branches have {num} tokens, and a rollout at most {most_tokens}")
    if (size := rollout.ByteSize()) > MAX_ENTRY_BYTES:
        rollout.ClearField("text")
        rollout.ClearField("prompt")
        rollout.episode.ClearField("turns_json")
        return _too_long(rollout, f"it has {size} bytes, and an entry of a stream at most {MAX_ENTRY_BYTES}")
    return rollout


def _too_long(rollout: Rollout, failure: str) -> Rollout:
    """A failure in place of the tokens."""
    rollout.ClearField("mask")
    rollout.ClearField("branch_starts")
    for name in SAMPLED:
        rollout.ClearField(name)
    rollout.outcome = rollout_pb2.OUTCOME_ENVIRONMENT_FAILED
    rollout.episode.failure_kind = TOO_LONG
    rollout.episode.failure = failure
    return rollout


def _failure(result: AgentResult, branches: Sequence[Sequence[RecordedTurn]]) -> tuple[str, str]:
    """Kind and text of the failure; empty where there is none."""
    if result.failure:
        return result.failure_kind, result.failure
    return ("", "") if branches else (NO_TURN, "the agent finished without an answer of the policy")


def _outcome(failure: tuple[str, str], branches: Sequence[Sequence[RecordedTurn]]) -> Outcome.ValueType:
    if any(failure):
        return rollout_pb2.OUTCOME_ENVIRONMENT_FAILED
    last = branches[0][-1].end
    is_cut = last is not None and last.finish == "length"
    return rollout_pb2.OUTCOME_TRUNCATED if is_cut else rollout_pb2.OUTCOME_ENVIRONMENT_DONE


def _prompt(first: RecordedTurn, of_task: Prompt) -> Prompt:
    """The first context of the first branch in place of the task's prompt, which the agent may have put otherwise."""
    columns, messages_json = of_task.columns_json, first.begin.messages_json
    return Prompt(token_ids=first.begin.context, text=of_task.text, messages_json=messages_json, columns_json=columns)


def _add_tokens(rollout: Rollout, branches: Sequence[Sequence[RecordedTurn]], *, keep_sets: bool) -> None:
    """Append the tokens of each branch. Turns that an earlier branch has are context in a later one."""
    trained: set[str] = set()
    for number, branch in enumerate(branches):
        if number:
            rollout.branch_starts.append(len(rollout.token_ids))
        for place, turn in enumerate(branch):
            if number or place:
                append_context(rollout, turn.begin.context, keep_sets=keep_sets)
            if turn.name in trained:
                append_context(rollout, turn.token_ids, keep_sets=keep_sets)
            else:
                append_sampled(rollout, turn)
        trained |= {turn.name for turn in branch}


def _messages(branch: Sequence[RecordedTurn]) -> tuple[str, str]:
    """The conversation behind its prompt as chat messages, and the text of the last answer."""
    messages: list[Message] = []
    text = ""
    for place, turn in enumerate(branch):
        messages += json.loads(turn.begin.messages_json) if place else []
        answer = json.loads(turn.end.message_json) if turn.end else {}
        messages.append(answer)
        text = answer.get("content", "")
    return json.dumps(messages, ensure_ascii=False), text
