"""The simulated engine keeps what the real one promises: lengths, finishes, versions across a load, abort."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.simulated.answers import key_of, log_probs
from benchmarks.simulated.engine import SimulatedEngine
from benchmarks.simulated.settings import Settings
from gspo.generation.engine.api import EngineBrokenError, EngineSampling
from gspo.generation.engine.staging import PolicyCopies
from tests.support.tiny_model import make_tiny_model

QUICK = Settings(decode_s=0.002, decode_s_per_request=0.0, length_median=40, load_s=0.0)


def engine(settings: Settings, max_num_seqs: int = 4) -> SimulatedEngine:
    return SimulatedEngine(settings, max_num_seqs=max_num_seqs, vocabulary=90, eos=2, key=7)


async def test_more_requests_than_fit_wait_and_all_are_answered() -> None:
    simulated = engine(QUICK, max_num_seqs=2)
    asked = [simulated.generate(f"{n}-0:1.0", [1, 2, 3], EngineSampling(max_tokens=38 + n)) for n in range(5)]
    answers = await asyncio.gather(*asked)
    assert [(len(answer.token_ids), answer.finish) for answer in answers] == [
        (38, "length"), (39, "length"), (40, "stop"), (40, "stop"), (40, "stop")]  # fmt: skip
    assert [answer.token_ids[-1] == 2 for answer in answers] == [False, False, True, True, True]
    again = await simulated.generate("4-0:2.0", [1, 2, 3], EngineSampling(max_tokens=42))
    assert again.token_ids == answers[4].token_ids
    assert simulated.num_running == 0
    await simulated.stop()


async def test_tokens_after_a_load_are_of_the_new_version(tmp_path: Path) -> None:
    copies = PolicyCopies.from_folder(make_tiny_model(tmp_path / "model"), "float32")
    copies.begin(changes=True)
    name = min(copies.places)
    copies.write(name, 0, (copies.serving.bits(name)[:1] + 1).tobytes())
    simulated = engine(QUICK)
    asked = asyncio.create_task(simulated.generate("1-0:1.0", [1, 2], EngineSampling(max_tokens=64)))
    await asyncio.sleep(0.03)
    await simulated.load(1, copies, on_update="recompute", timeout_s=5)
    answer = await asked
    switch = answer.version.index(1)
    assert 0 < switch < 40
    assert answer.version == [0] * switch + [1] * (40 - switch)
    key = key_of(copies, copies.serving)
    assert answer.logp[:switch] == log_probs(answer.token_ids, 2, 7).tolist()[:switch]
    assert answer.logp[switch:] == log_probs(answer.token_ids, 2, key).tolist()[switch:]
    await simulated.stop()
    copies.close()


async def test_an_aborted_request_returns_what_it_has_and_a_stopped_engine_refuses() -> None:
    simulated = engine(QUICK)
    asked = asyncio.create_task(simulated.generate("1-0:1.0", [1], EngineSampling(max_tokens=64)))
    await asyncio.sleep(0.03)
    await simulated.abort("1-0:1.0")
    answer = await asked
    assert answer.finish == "aborted"
    assert 0 < len(answer.token_ids) < 40
    await simulated.stop()
    with pytest.raises(EngineBrokenError):
        await simulated.generate("2-0:1.0", [1], EngineSampling(max_tokens=1))


async def test_without_time_an_answer_is_there_at_once_with_lengths_as_drawn() -> None:
    simulated = engine(Settings(time_scale=0, length_median=100, length_sigma=1.0, length_longest=3.0))
    answers = [await simulated.generate(f"{n}-0:1.0", [1], EngineSampling(max_tokens=1000)) for n in range(200)]
    lengths = sorted(len(answer.token_ids) for answer in answers)
    assert lengths[-1] == 300
    assert 80 < lengths[100] < 120
    await simulated.stop()
