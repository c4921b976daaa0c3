"""The turns of one rollout of an agent: which one a request continues, and the branches that they make.

Pure: no Redis, no engine, no renderer. Token in, token out: what the policy wrote is neither rendered nor tokenised
again. A request whose history shows another text than the policy wrote begins a branch of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo.common.streams.entries import SAMPLED
from gspo_proto.agent_pb2 import TurnBegin, TurnEnd, TurnEntry

Message = dict[str, Any]
_FIELDS = ("role", "name", "tool_call_id", "reasoning", "reasoning_content")
_PART_FIELDS = ("type", "text")


@dataclass(eq=False)
class RecordedTurn:
    """A request with the tokens that the policy sampled for it.

    Attributes:
        before: The turn that it continues; None begins a branch.
        end: None while the policy writes, and where the answer was cancelled.
    """

    name: str
    begin: TurnBegin
    before: RecordedTurn | None
    token_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    kept_sizes: list[int] = field(default_factory=list)
    kept_ids: list[int] = field(default_factory=list)
    end: TurnEnd | None = None

    @property
    def line(self) -> list[RecordedTurn]:
        """The turns from the beginning of the branch to this one."""
        line, turn = [self], self.before
        while turn is not None:
            line.append(turn)
            turn = turn.before
        return line[::-1]

    @property
    def all_token_ids(self) -> list[int]:
        """Every token from the beginning of the branch to the end of this turn."""
        return [token for turn in self.line for token in (*turn.begin.context, *turn.token_ids)]

    @property
    def messages(self) -> list[Message]:
        """The messages from the beginning of the branch to the reply of this turn, which has ended."""
        messages: list[Message] = []
        for turn in self.line:
            messages += json.loads(turn.begin.messages_json)
            messages += [json.loads(turn.end.message_json)] if turn.end else []
        return messages


class Conversation:
    """The turns of a rollout so far, in the order in which they began."""

    def __init__(self, entries: Iterable[TurnEntry]) -> None:
        self.turns: dict[str, RecordedTurn] = {}
        for entry in entries:
            match entry.WhichOneof("what"):
                case "begin":
                    before = self.turns.get(entry.begin.continues)
                    self.turns[entry.turn] = RecordedTurn(entry.turn, entry.begin, before)
                case "tokens":
                    turn = self.turns[entry.turn]
                    for name in SAMPLED:
                        getattr(turn, name).extend(getattr(entry.tokens, name))
                case "end":
                    self.turns[entry.turn].end = entry.end

    @property
    def finished(self) -> list[RecordedTurn]:
        """The turns whose whole answer was sampled."""
        return [turn for turn in self.turns.values() if turn.end is not None]

    def continued(
        self, messages: Sequence[Message], digests: Sequence[str], shown: str
    ) -> tuple[RecordedTurn, int] | None:
        """The turn that a request continues, and the place of its reply among the messages.

        It is the one with the latest place. Turns that differ in white space alone have the same place. Of them, it is
        the one with the most texts that equal the request's, or the last of those.

        Args:
            messages: The request's.
            digests: Those of the messages before each place, as `prefix_digests` gives them.
            shown: The request as the chat template renders it. A turn whose thoughts or text it leaves out is not
                continued: the policy would see what the template hides.
        """
        places = {digest: place for place, digest in enumerate(digests)}
        fitting: dict[int, list[RecordedTurn]] = {}
        for turn in reversed(self.finished):
            place = places.get(turn.begin.asked, len(messages))
            if place < len(messages) and turn.end and message_digest(messages[place]) in turn.end.replies:
                fitting.setdefault(place, []).append(turn)
        for place in sorted(fitting, reverse=True):
            if turns := [turn for turn in fitting[place] if _is_shown(turn, shown)]:
                return max(turns, key=lambda turn: _num_exact(turn, messages)), place
        return None

    def continued_text(self, token_ids: Sequence[int]) -> RecordedTurn | None:
        """The turn with the most tokens that a context of tokens begins with."""
        lines = [(turn, turn.all_token_ids) for turn in self.finished]
        fitting = [(turn, line) for turn, line in lines if list(token_ids[: len(line)]) == line]
        return max(fitting, key=lambda pair: len(pair[1]), default=(None, []))[0]

    def is_continued(self, turn: RecordedTurn | None) -> bool:
        """Whether a request continues this turn already."""
        return turn is not None and any(other.before is turn for other in self.turns.values())

    def branches(self) -> list[list[RecordedTurn]]:
        """The finished turns as branches, each from its beginning to a turn that no other continues.

        The branch of the last request comes first: it is the conversation that the agent ended with, where others are
        titles, sub-agents, or what a summary has replaced. The others follow in the order of their ends.
        """
        continued = {turn.before for turn in self.finished}
        lines = [turn.line for turn in self.finished if turn not in continued]
        return [*lines[-1:], *lines[:-1]]


def _is_shown(last: RecordedTurn, shown: str) -> bool:
    return all(text in shown for turn in last.line if turn.end is not None for text in turn.end.shown)


def _num_exact(turn: RecordedTurn, messages: Sequence[Message]) -> int:
    """The number of texts up to the turn's reply that a request has with the same white space."""
    pairs = zip(turn.messages, messages, strict=False)
    return sum(_whole_text(own) == _whole_text(sent) for own, sent in pairs)


def prefix_digests(messages: Sequence[Message], template: Any) -> list[str]:
    """Digests of the first 0, 1, .. messages, with all that the chat template reads beside them, such as tools."""
    digests = [_digest(json.dumps(template, sort_keys=True, default=str))]
    for message in messages:
        digests.append(_digest(digests[-1] + message_digest(message)))
    return digests


def message_digest(message: Message) -> str:
    """Digest of a message: equal for the forms in which clients send the same text and calls.

    Ids of calls are left out, since APIs name them differently. Thoughts are left out: few clients send them back.
    """
    calls = [_call(call.get("function", call)) for call in message.get("tool_calls") or ()]
    return _digest(json.dumps([message.get("role"), text_of(message), calls], sort_keys=True))


def stored_message(message: Message) -> Message:
    """The fields of a message that chat templates, rewards and people read; a client may send any others."""
    stored = {name: message[name] for name in _FIELDS if isinstance(message.get(name), str)}
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        stored["content"] = [{name: part[name] for name in _PART_FIELDS if name in part} for part in parts]
    elif "content" in message:
        stored["content"] = content
    if calls := message.get("tool_calls"):
        stored["tool_calls"] = [_stored_call(call) for call in calls]
    return stored


def _stored_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    kept = {name: function[name] for name in ("name", "arguments") if name in function}
    return {**({"id": call["id"]} if isinstance(call.get("id"), str) else {}), "type": "function", "function": kept}


def text_of(message: Message) -> str:
    """The text of a message, without white space at its ends."""
    return _whole_text(message).strip()


def _whole_text(message: Message) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content


def _call(function: dict[str, Any]) -> list[Any]:
    """Name and arguments of a call; arguments are compared as values, not as text."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return [function.get("name"), arguments]
    return [function.get("name"), arguments or {}]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
