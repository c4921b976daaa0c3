"""Our reward service with nothing but Redis beside it: rollouts in its stream, scores counted in the next."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from typing import Any

from redis.asyncio import Redis

from benchmarks.harness.child_process import MeasurementError
from benchmarks.harness.single_service import beside
from benchmarks.harness.sizes import CACHE
from gspo.common.config.loading import CONFIG_NAME, parse_config
from gspo.common.config.loading import write_config as write_whole_config
from gspo.common.streams.entries import SCHEMA
from gspo.common.streams.inbox import append
from gspo.common.streams.instances import wait_for_instance
from gspo.common.streams.keys import Keys
from gspo_proto.rollout_pb2 import OUTCOME_EOS, Prompt, Rollout

_START_S, _RUN_S = 60.0, 120.0
_GROUP_SIZE, _NUM_TOKENS, _AT_A_TIME = 8, 128, 500
_LOOK_EVERY_S = 0.02


def measure(num_rollouts: int, source: str) -> dict[str, Any]:
    """Rollouts a second from the stream through the sandbox into the next stream.

    Raises:
        MeasurementError: A process did not start, or the scores did not come.
    """
    folder = CACHE / "runs" / "reward"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "reward.py").write_text(source)
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    given = {
        "name": "reward",
        "model": {"path": str(folder)},
        "data": {"prompts": "prompts.jsonl"},
        "reward": {"functions": [{"path": "reward.py"}]},
        "run": {"directory": str(folder), "total_steps": 1},
    }
    config = parse_config(given, folder)
    config.run_dir.mkdir(exist_ok=True)
    write_whole_config(config, config.run_dir / CONFIG_NAME)
    scoring = beside("reward", config, lambda redis, _: _score(redis, Keys(config.name), num_rollouts))
    seconds = asyncio.run(scoring)
    return {"what": "stream", "num_rollouts": num_rollouts, "seconds": seconds, "per_s": num_rollouts / seconds}


async def _score(redis: Redis, keys: Keys, num_rollouts: int) -> float:
    """Seconds from the first rollout in the stream to the last score in the next."""
    try:
        await wait_for_instance(redis, keys, "reward", _START_S)
    except TimeoutError as error:
        raise MeasurementError(str(error)) from error
    entries = [_rollout(number).SerializeToString() for number in range(num_rollouts)]
    began = time.perf_counter()
    for start in range(0, num_rollouts, _AT_A_TIME):
        await append(redis, keys.rollouts, entries[start : start + _AT_A_TIME])
    while await redis.xlen(keys.scored) < num_rollouts:
        if time.perf_counter() - began > _RUN_S:
            raise MeasurementError(f"not all of {num_rollouts} rollouts were scored within {_RUN_S:g} s")
        await asyncio.sleep(_LOOK_EVERY_S)
    return time.perf_counter() - began


def _rollout(number: int) -> Rollout:
    return Rollout(
        schema=SCHEMA,
        group=number // _GROUP_SIZE,
        number=number % _GROUP_SIZE,
        attempt=1,
        num_rollouts=_GROUP_SIZE,
        prompt=Prompt(token_ids=[5, 6], text="1+1=", columns_json=json.dumps({"answer": "2"})),
        token_ids=range(_NUM_TOKENS),
        logp=[-0.5] * _NUM_TOKENS,
        version=[0] * _NUM_TOKENS,
        mask=b"\1" * _NUM_TOKENS,
        text="the answer is 2" * 8,
        outcome=OUTCOME_EOS,
    )
