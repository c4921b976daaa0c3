"""A teacher at an address: vLLM's own server of a random model, asked by the check, the reward service and the learner.

Its log-probs are compared with those of the same model as teacher.path.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from gspo.common.config.schema import Config
from gspo.common.config.teacher import TeacherConfig
from gspo.common.errors import InputError
from gspo.common.model.teacher_server import check_teacher_server
from gspo.common.service.app import Service
from gspo.common.service.options import Options
from gspo.common.streams.events import Events
from gspo.common.streams.inbox import append
from gspo.common.streams.keys import Keys
from gspo.common.weights.manifest import policy_digest
from gspo.learner.assembly.rows import Row
from gspo.learner.storage.step_log import StepLog
from gspo.learner.training.trainer import Trainer
from gspo.reward.scoring.consumer import ScoringConsumer
from gspo.reward.scoring.scorer import open_scorer
from gspo.reward.scoring.taught_tokens import TaughtTokens
from gspo_proto.rollout_pb2 import RUN_END_FAILED, Prompt, Rollout, Score, Scored
from tests.conftest import free_port
from tests.support.reward_rollouts import make_rollout, reward_or_failure
from tests.support.service_process import make_run
from tests.support.tiny_model import make_tiny_model, make_tokenizer
from tests.support.training.rollout_rows import make_config, make_rows, train
from tests.support.training.vllm_server import KEY, vllm_server, way_to
from tests.support.typed.redis_entries import payloads

pytestmark = pytest.mark.long
NAME, MAX_LENGTH, ROWS = "larger", 129, 99


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("policy"), scale=4.0)


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "model"
    return make_tiny_model(folder, hidden_size=96, layers=3, seed=1, scale=4.0)


@pytest.fixture(scope="module")
def address(larger: Path) -> Iterator[str]:
    with vllm_server(larger, NAME, max_length=MAX_LENGTH) as url:
        yield url


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSPO_TEACHER_API_KEY", KEY)


def config_of(policy: Path, address: str, **sections: Any) -> Config:
    return make_config(policy, teacher={"address": address, "model": NAME, **sections.pop("teacher", {})}, **sections)


def refused(config: Config, policy: Path, rows: int | None = ROWS) -> InputError:
    with pytest.raises(InputError) as caught:
        check_teacher_server(config, policy, rows)
    return caught.value


def test_a_server_that_cannot_teach_is_refused(
    policy: Path, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(policy, address)
    check_teacher_server(config, policy, ROWS)
    other = refused(config_of(policy, address, teacher={"model": "other"}), policy)
    assert (other.where, f"serves {NAME!r}, not 'other'" in other.rule) == ("teacher.model", True)
    long = refused(config_of(policy, address, algorithm={"response_length": 65}), policy)
    assert "reads at most 129 tokens" in long.rule and "--max-model-len 130" in long.fix
    assert "Token id 99 is out of vocabulary" in refused(config, policy, ROWS + 1).rule
    nowhere = f"http://127.0.0.1:{free_port()}"
    assert f"{nowhere}/v1/models gives no answer (ConnectError" in refused(config_of(policy, nowhere), policy).rule
    assert "HTTP 404" in refused(config_of(policy, f"{address}/v1"), policy).rule
    monkeypatch.delenv("GSPO_TEACHER_API_KEY")
    assert "GSPO_TEACHER_API_KEY" in refused(config, policy).fix


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({'"7": 10': '"7": 11', '"8": 11': '"8": 10'}, "id 11 is '7' for the policy and '8' for the teacher"),
        ({"<|im_end|>": "</s>"}, "id 2 is '</s>' for the policy and not read so for the teacher"),
    ],
    ids=["a character", "a special token"],
)
def test_another_tokenizer_is_refused(
    policy: Path, address: str, tmp_path: Path, changes: dict[str, str], rule: str
) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    text = json.dumps(json.loads(file.read_text()))
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    file.write_text(text)
    assert rule in refused(config_of(policy, address), tmp_path).rule


def digest(trainer: Trainer) -> str:
    weights = trainer.engine.policy()
    return policy_digest((name, str(w.dtype), tuple(w.shape), w.numpy()) for name, w in weights.items())


def as_rollout(row: Row) -> Rollout:
    return Rollout(
        group=row.group,
        number=row.number,
        num_rollouts=row.num_rollouts,
        prompt=Prompt(token_ids=row.prompt_token_ids.tolist()),
        token_ids=row.token_ids.tolist(),
        branch_starts=row.branch_starts.tolist(),
    )


@pytest.mark.asyncio(loop_scope="function")
@pytest.mark.parametrize("kl_in", ["advantage", "loss"])
async def test_it_teaches_as_the_same_model_in_the_learner_does_and_a_replay_has_the_same_bits(
    policy: Path, larger: Path, address: str, tmp_path: Path, kl_in: str
) -> None:
    """The replay has the log alone: no server, and rows as they came from the disk."""
    rows, problems = make_rows(policy), list[str]()
    config = config_of(policy, address, teacher={"kl_in": kl_in})
    teacher = TaughtTokens(config.teacher, never, problems.append)
    taught = await teacher.score([as_rollout(row) for row in rows])
    await teacher.close()
    assert {*problems} == {""}
    scored = [replace(row, teacher_logp=np.array(logp, np.float32)) for row, logp in zip(rows, taught, strict=True)]
    log = StepLog(tmp_path)
    log.write(1, scored)
    trainers = [Trainer(config, policy), Trainer(config, policy)]
    figures = [train(trainer, 1, rows).metrics for trainer, rows in zip(trainers, (scored, log.read(1)), strict=True)]
    assert digest(trainers[0]) == digest(trainers[1])
    local = train(Trainer(make_config(policy, teacher={"path": str(larger), "kl_in": kl_in}), policy), 1, rows).metrics
    assert abs(local["teacher_kl"]) > 0.05
    for name in ("teacher_kl", "loss", "grad_norm"):
        assert figures[0][name] == figures[1][name] == pytest.approx(local[name], rel=1e-3), name
    assert "train_flops" in local and figures[0]["train_flops"] < local["train_flops"]


@pytest.mark.asyncio(loop_scope="function")
async def test_each_branch_is_read_after_its_own_context(policy: Path, address: str) -> None:
    teacher = TaughtTokens(config_of(policy, address).teacher, never, lambda _: None)
    branched = Rollout(prompt=Prompt(token_ids=[5, 6]), token_ids=[7, 8, 9, 10, 11, 12], branch_starts=[2])
    alone = [
        Rollout(prompt=Prompt(token_ids=prompt), token_ids=token_ids)
        for prompt, token_ids in (([5, 6], [7, 8]), ([9], [10, 11, 12]))
    ]
    both, first, second = await teacher.score([branched, *alone])
    await teacher.close()
    assert isinstance(both, list) and isinstance(first, list) and isinstance(second, list)
    assert both == pytest.approx([*first, 0.0, *second], abs=1e-5)


async def never(reason: str) -> None:
    raise AssertionError(reason)


@asynccontextmanager
async def scoring(folder: Path, policy: Path, redis_url: str, teacher: dict[str, Any]) -> AsyncIterator[Service]:
    """A scoring consumer of a run with this teacher, in this process."""
    (folder / "r.py").write_text("def reward(completions): return map(float, completions)")
    reward = {"functions": [{"path": str(folder / "r.py")}]}
    config = make_run(folder, policy, reward=reward, teacher={"model": NAME, **teacher}, run={"drain_timeout_s": 0.1})
    service = Service(Options("reward", config.run_dir, redis_url, "reward-0", "127.0.0.1", 0, 0, False, config))
    async with open_scorer(config.reward, name="reward-0") as scorer:
        consuming = asyncio.create_task(ScoringConsumer(service, scorer).run())
        yield service
        service.stopping.set()
        await asyncio.wait_for(consuming, 20)
    await service.close()


async def scores_of(redis: Redis, keys: Keys, count: int) -> list[Score]:
    """The scores of training rollouts, by number, once there are so many."""
    async with asyncio.timeout(30):
        while len(entries := await payloads(redis, keys.scored)) < count:
            await asyncio.sleep(0.05)
    scored = [Scored.FromString(entry).rollout for entry in entries]
    return [entry.score for entry in sorted(scored, key=lambda entry: entry.rollout.number)]


@pytest.mark.asyncio(loop_scope="function")
async def test_a_server_that_is_down_is_waited_for_and_then_ends_the_run_without_a_loss(
    redis: Redis, redis_url: str, keys: Keys, policy: Path, address: str, tmp_path: Path
) -> None:
    port = free_port()
    teacher = {"address": f"http://127.0.0.1:{port}", "timeout_s": 0.5}
    async with scoring(tmp_path, policy, redis_url, teacher) as service:
        rollouts = [make_rollout("4", number=0), make_rollout("5", number=1), make_rollout("no", number=2)]
        rollouts[1].token_ids[1] = ROWS  # no token of the teacher's
        await append(redis, keys.rollouts, [rollout.SerializeToString() for rollout in rollouts])
        await append(redis, keys.eval_rollouts, [Rollout(**fields_of(rollouts[0])).SerializeToString()])
        async with asyncio.timeout(20):
            while not (events := await Events(redis, keys, "test").read(b"0", 0.1)):
                pass
        finished = events[0][1].finished
        assert finished.end == RUN_END_FAILED
        assert f"{port}/v1/completions gave no answer within 0.5 s (ConnectError" in finished.reason
        assert service.activity.what == "teacher" and "ConnectError" in service.activity.detail
        # An evaluation asks no teacher; the rollouts in hand are as pending as before.
        assert await redis.xlen(keys.eval_scored) == 1 and await redis.xlen(keys.scored) == 0
        assert await redis.xlen(keys.rollouts) == len(rollouts)
        async with way_to(address, port):
            good, foreign, unscored = await scores_of(redis, keys, 3)
        assert service.activity.what != "teacher"
    assert len(good.teacher_logp) == 2 and reward_or_failure(good) == 4.0
    assert all(-20 < value < 0 for value in good.teacher_logp)
    assert "the teacher: " in foreign.failure and "Token id 99 is out of vocab" in foreign.failure
    assert (foreign.failure_kind, len(foreign.teacher_logp)) == ("exception", 0)
    assert unscored.HasField("failure") and len(unscored.teacher_logp) == 2


def fields_of(rollout: Rollout) -> dict[str, Any]:
    fields = ("schema", "group", "attempt", "num_rollouts", "token_ids", "logp", "version", "mask", "text")
    return {**{name: getattr(rollout, name) for name in fields}, "evaluation": "v0"}


@pytest.mark.asyncio(loop_scope="function")
async def test_another_model_at_the_address_teaches_nothing(policy: Path, address: str) -> None:
    """Nor does a wrong key: neither is the rollout's failure."""
    silent, problems = asyncio.Event(), list[str]()

    async def end_run(reason: str) -> None:
        problems.append(reason)
        silent.set()

    config = TeacherConfig(address=address, model="another", timeout_s=0.5)
    teacher = TaughtTokens(config, end_run, problems.append)
    asking = asyncio.create_task(teacher.score([make_rollout("4")]))
    await asyncio.wait_for(silent.wait(), 20)
    asking.cancel()
    await teacher.close()
    assert "The model `another` does not exist" in problems[-1] and "within 0.5 s" in problems[-1]
