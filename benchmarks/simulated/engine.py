"""An engine that only takes time: requests share decode steps as in continuous batching, and nothing is computed.

A decode step of n requests takes decode_s + n * decode_s_per_request, and gives each of them a token; more requests
than max_num_seqs wait. Weights change between two steps, and each token has the version that sampled it. Not here: a
model; log-probs come from answers.py.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.simulated.answers import Answers, key_of, log_probs
from benchmarks.simulated.settings import Settings
from gspo.common.config.schema import Config
from gspo.generation.engine.api import (
    Completion,
    Drafts,
    EngineBrokenError,
    EngineSampling,
    Finish,
    LoadTimes,
    OnUpdate,
    Tokens,
)
from gspo.generation.engine.staging import PolicyCopies

# The part of a decode step by which a timer may ring too early.
_ALMOST = 1e-6


@dataclass(eq=False)
class _Request:
    """A request for tokens `first` .. first + length - 1 of its answer; the earlier ones are in the prompt.

    `begun` is the step at which it was admitted; `loads` has the (tokens before it, version) of each load.
    """

    request_id: str
    prompt_length: int
    first: int
    length: int
    stops: bool
    done: asyncio.Future[Completion]
    begun: float = math.inf
    loads: list[tuple[int, int]] = field(default_factory=list)

    @property
    def end(self) -> float:
        """The step after which its last token is there."""
        return self.begun + self.length


class SimulatedEngine:
    """Takes the time that an engine takes. All calls from one event loop.

    Args:
        eos: The token that ends an answer which was not cut off.
        key: That of the weights of `version`; see answers.py.
    """

    def __init__(
        self, settings: Settings, *, max_num_seqs: int, vocabulary: int, eos: int, key: int, version: int = 0
    ) -> None:
        self.version, self.is_asleep, self.drafts = version, False, Drafts()
        self._keys = {version: key}
        self._settings, self._max_num_seqs, self._eos = settings, max_num_seqs, eos
        self._answers = Answers(vocabulary, settings.seed)
        self._running: dict[_Request, None] = {}
        self._by_id: dict[str, _Request] = {}
        self._waiting: deque[_Request] = deque()
        self._steps, self._seen_at = 0.0, time.monotonic()
        self._changed, self._serving, self._loading = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._serving.set()
        self._stopped = False
        self._decoding = asyncio.create_task(self._decode())

    async def generate(self, request_id: str, prompt_token_ids: list[int], sampling: EngineSampling) -> Completion:
        """One answer, or the next piece of it; its length and tokens follow from the request's id.

        The part after the last colon is not the answer's name: it ends with the token at which the piece begins.
        """
        await self._serving.wait()
        if self._stopped:
            raise EngineBrokenError("generation engine: stopped")
        first = int(request_id.rpartition(".")[2])
        natural = max(1, self._settings.length(_name(request_id)) - first)
        length = min(natural, sampling.max_tokens)
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = _Request(request_id, len(prompt_token_ids), first, length, natural <= sampling.max_tokens, done)
        if not self._settings.time_scale:
            # Other tasks run meanwhile, as with every engine.
            await asyncio.sleep(0)
            request.loads = [(0, self.version)]
            return self._answer(request, length)
        self._waiting.append(request)
        self._changed.set()
        try:
            return await done
        finally:
            self._drop(request)

    async def abort(self, request_id: str) -> None:
        """End every request of this id; each returns its tokens so far, as `aborted`."""
        self._advance()
        for request in [*self._running, *self._waiting]:
            if request.request_id == request_id:
                self._end(request, self._num_sampled(request))

    async def checksum(self, timeout_s: float) -> str:
        """That of the weights of `version`."""
        return str(self._keys[self.version])

    def num_sampled(self, request_id: str) -> int:
        """The number of tokens that an in-flight request has sampled so far; else 0."""
        request = self._find(request_id)
        return self._num_sampled(request) if request else 0

    def partial_output(self, request_id: str, first: int = 0) -> Tokens:
        """The tokens that an in-flight request has sampled so far, from place `first` on; else none."""
        if (request := self._find(request_id)) is None:
            return Tokens([], [], [])
        so_far = self._sampled(request, self._num_sampled(request))
        return Tokens(so_far.token_ids[first:], so_far.logp[first:], so_far.version[first:])

    async def load(self, version: int, copies: PolicyCopies, *, on_update: OnUpdate, timeout_s: float) -> LoadTimes:
        """Serve the staged copy; requests in flight go on under it, or end where `on_update` is restart.

        A cancelled call continues in the background.
        """
        return await asyncio.shield(asyncio.ensure_future(self._load(version, copies, on_update)))

    async def sleep(self, *, on_update: OnUpdate, timeout_s: float) -> None:
        """Stand still until `wake`; requests in flight go on after it."""
        async with self._loading:
            self._advance()
            self.is_asleep = True
            self._serving.clear()

    async def wake(self, version: int, copies: PolicyCopies, *, timeout_s: float) -> LoadTimes:
        """Go on, under the staged copy."""
        self.is_asleep = False
        return await self.load(version, copies, on_update="recompute", timeout_s=timeout_s)

    async def stop(self, timeout_s: float = 20.0) -> None:
        """End; requests in flight fail."""
        self._stopped = True
        self._decoding.cancel()
        for request in [*self._running, *self._waiting]:
            if not request.done.done():
                request.done.set_exception(EngineBrokenError("generation engine: stopped"))

    @property
    def num_running(self) -> int:
        """Requests that it holds."""
        return len(self._running) + len(self._waiting)

    def _find(self, request_id: str) -> _Request | None:
        self._advance()
        return self._by_id.get(request_id)

    async def _load(self, version: int, copies: PolicyCopies, on_update: OnUpdate) -> LoadTimes:
        async with self._loading:
            self._advance()
            self._serving.clear()
            if on_update == "restart":
                for request in list(self._running):
                    self._end(request, self._num_sampled(request), cut="restart")
            began = time.monotonic()
            await asyncio.sleep(self._settings.time_scale * self._settings.load_s)
            copies.promote()
            self.version, self._keys[version] = version, key_of(copies, copies.serving)
            for request in self._running:
                request.loads.append((self._num_sampled(request), version))
            self._seen_at = time.monotonic()
            self._serving.set()
            self._changed.set()
            return LoadTimes(0.0, self._seen_at - began, 0.0)

    async def _decode(self) -> None:
        """Let the steps go by, and end each request with its last one."""
        while True:
            await self._serving.wait()
            self._advance()
            for request in [request for request in self._running if request.end <= self._steps + _ALMOST]:
                self._end(request, request.length)
            self._admit()
            self._changed.clear()
            rest = min((request.end for request in self._running), default=math.inf) - self._steps
            step_s = self._settings.decode_step_s(len(self._running))
            try:
                async with asyncio.timeout(None if math.isinf(rest) else max(0.0, rest) * step_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            request = self._waiting.popleft()
            prefill_s = self._settings.time_scale * self._settings.prefill_s_per_token * request.prompt_length
            request.begun = self._steps + prefill_s / self._settings.decode_step_s(len(self._running) + 1)
            request.loads = [(0, self.version)]
            self._running[request] = None
            self._by_id[request.request_id] = request

    def _advance(self) -> None:
        """Count the steps since the last look; none while weights change."""
        now = time.monotonic()
        if self._serving.is_set() and self._running:
            self._steps += (now - self._seen_at) / self._settings.decode_step_s(len(self._running))
        self._seen_at = now

    def _num_sampled(self, request: _Request) -> int:
        return max(0, min(request.length, math.floor(self._steps - request.begun))) if request in self._running else 0

    def _end(self, request: _Request, num_tokens: int, cut: Finish = "aborted") -> None:
        if not request.done.done():
            request.done.set_result(self._answer(request, num_tokens, cut))
        self._drop(request)

    def _drop(self, request: _Request) -> None:
        if request in self._running or request in self._waiting:
            self._advance()
            self._running.pop(request, None)
            self._by_id.pop(request.request_id, None)
            if request in self._waiting:
                self._waiting.remove(request)
            self._changed.set()

    def _answer(self, request: _Request, num_tokens: int, cut: Finish = "aborted") -> Completion:
        sampled = self._sampled(request, num_tokens)
        finish: Finish = cut if num_tokens < request.length else "stop" if request.stops else "length"
        return Completion(sampled.token_ids, sampled.logp, sampled.version, finish)

    def _sampled(self, request: _Request, num_tokens: int) -> Tokens:
        token_ids = self._answers.tokens(_name(request.request_id), request.first, num_tokens)
        if num_tokens == request.length and request.stops:
            token_ids[-1] = self._eos
        logp: list[float] = []
        versions: list[int] = []
        ends = [first for first, _ in request.loads[1:]] + [num_tokens]
        for (first, version), end in zip(request.loads, ends, strict=True):
            last = min(end, num_tokens)
            part = log_probs(token_ids[first:last], request.prompt_length + first, self._keys[version])
            logp += part.tolist()
            versions += [version] * len(part)
        return Tokens(token_ids.tolist(), logp, versions)


async def start_simulated(config: Config, folder: Path) -> SimulatedEngine:
    """Like gspo.generation.engine.startup.start_engine, for a whole generation process."""
    settings = Settings.from_environment()
    await asyncio.sleep(settings.time_scale * settings.start_s)
    facts = json.loads((folder / "config.json").read_text())
    eos = facts["eos_token_id"]
    copies = PolicyCopies.from_folder(folder, config.generation.dtype)
    key = key_of(copies, copies.serving)
    copies.close()
    return SimulatedEngine(
        settings,
        max_num_seqs=config.generation.max_rollouts,
        vocabulary=int(facts["vocab_size"]),
        eos=eos if isinstance(eos, int) else eos[0],
        key=key,
    )


def _name(request_id: str) -> str:
    """The name of a request's answer, which every attempt shares."""
    return request_id.rpartition(":")[0]
