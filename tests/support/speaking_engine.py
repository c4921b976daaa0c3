"""An engine in whose place no model can stand: what it answers is what the test says."""

from __future__ import annotations

import asyncio

from gspo.generation.engine.api import Completion, EngineSampling, Tokens
from tests.support.started_gateway import TOKENIZER


class SpeakingEngine:
    """An engine with one answer, so that a parser of tool calls has something to read."""

    version, is_asleep = 3, False

    def __init__(self, text: str) -> None:
        self._token_ids = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]

    async def generate(self, request_id: str, prompt_token_ids: list[int], sampling: EngineSampling) -> Completion:
        """All of it, after a while in which its half can be seen."""
        await asyncio.sleep(0.1)
        return Completion(**vars(self.partial_output(request_id, len(self._token_ids))), finish="stop")

    def num_sampled(self, request_id: str) -> int:
        """Half of the answer."""
        return len(self._token_ids) // 2

    def partial_output(self, request_id: str, num: int | None = None) -> Tokens:
        """Half of the answer."""
        token_ids = self._token_ids[: num or self.num_sampled(request_id)]
        return Tokens(token_ids, [-0.5] * len(token_ids), [self.version] * len(token_ids))
