"""An agent for tests of losses: it asks, hangs up, retries after errors, and notes the answers.

httpx is all that it needs, so a worker on its own loads it in a second.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httpx

from gspo.agents.player.task import Task

Message = dict[str, Any]
_RETRY_S = 0.2
_MORE: Message = {"role": "user", "content": "Go on."}


@dataclass
class PlayedTask:
    """A rollout that an agent has played.

    Attributes:
        answers: Texts that it read to their ends.
        num_unread: Requests whose reply was lost, which it sent again, and those that it cancelled.
    """

    id: str
    attempt: int
    answers: list[str] = field(default_factory=list)
    num_unread: int = 0


class RestlessAgent:
    """Asks some questions in a rollout, some of them side by side, with rewritten histories and cancelled streams.

    Attributes:
        played: Every rollout that it has finished, by reward.
        attempts: The attempts of each rollout.
    """

    def __init__(self, seed: int = 0) -> None:
        self.played: dict[float, PlayedTask] = {}
        self.attempts: dict[str, list[int]] = {}
        self._rewards, self._seed = itertools.count(1), seed

    async def __call__(self, task: Task) -> float:
        """Play a rollout; what it asks follows from the rollout's name."""
        played, drawn = PlayedTask(task.id, task.attempt), random.Random(f"{self._seed} {task.id}")  # noqa: S311 - what it asks
        self.attempts.setdefault(task.id, []).append(task.attempt)
        headers = {"authorization": f"Bearer {task.api_key}"}
        # Without TLS, which takes longer to set up than an answer.
        async with httpx.AsyncClient(base_url=task.base_url, headers=headers, timeout=15.0, verify=False) as http:  # noqa: S501
            history = list(task.messages)
            for _ in range(drawn.randrange(1, 3)):
                if drawn.random() < 0.2:
                    await self._cancel(http, history)
                    played.num_unread += 1
                history += [await self._ask(http, history, played), _MORE]
                if drawn.random() < 0.2:
                    history = [{"role": "user", "content": f"Summary {drawn.randrange(10)}."}]
            together = [self._ask(http, [*history, _number(n)], played) for n in range(drawn.choice((0, 0, 2)))]
            await asyncio.gather(*together)
        reward = float(next(self._rewards))
        self.played[reward] = played
        return reward

    async def _ask(self, http: httpx.AsyncClient, history: list[Message], played: PlayedTask) -> Message:
        """The answer, streamed or not; asked again where a gateway is lost, as the clients of these APIs do."""
        body = {"model": "policy", "messages": history, "max_tokens": 24, "stream": bool(len(history) % 2)}
        while True:
            with suppress(httpx.HTTPError, ValueError):
                text = await self._text(http, body)
                played.answers.append(text)
                return {"role": "assistant", "content": text}
            played.num_unread += 1
            await asyncio.sleep(_RETRY_S)

    async def _text(self, http: httpx.AsyncClient, body: dict[str, Any]) -> str:
        async with http.stream("POST", "/chat/completions", json=body) as reply:
            if HTTPStatus.BAD_REQUEST <= reply.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
                raise RuntimeError((await reply.aread()).decode())
            reply.raise_for_status()
            if not body["stream"]:
                message = json.loads(await reply.aread())["choices"][0]["message"]
                return str(message["content"])
            text, is_whole = "", False
            async for line in reply.aiter_lines():
                is_whole = is_whole or line == "data: [DONE]"
                if line.startswith("data: {"):
                    data = json.loads(line.removeprefix("data: "))
                    if "error" in data:  # "[DONE]" follows it too
                        raise ValueError(data["error"]["message"])
                    for choice in data["choices"]:
                        text += choice["delta"].get("content") or ""
        if not is_whole:
            raise ValueError("the stream ended early")
        return text

    async def _cancel(self, http: httpx.AsyncClient, history: list[Message]) -> None:
        """Ask, and hang up at the first line of the answer."""
        body = {"model": "policy", "messages": history, "stream": True}
        with suppress(httpx.HTTPError):
            async with http.stream("POST", "/chat/completions", json=body) as reply:
                async for _ in reply.aiter_lines():
                    break


def _number(number: int) -> Message:
    return {"role": "user", "content": f"Number {number}?"}
