"""A run with hostile callers: without the token, without the certificate, without Redis's password.

Every call also gets messages that no writer of ours sends.

Four real services over TLS, with engine and training step simulated.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from gspo.cli.processes.redis_server import redis_executable
from gspo.common.streams.entries import MAX_ENTRY_BYTES
from gspo_proto import generation_pb2, learner_pb2, reward_pb2
from gspo_proto.generation_pb2 import (
    GenerateRequest,
    PushHeader,
    SampleRequest,
    SleepRequest,
    TensorFrame,
    WeightFrame,
)
from gspo_proto.learner_pb2 import ResultsRequest
from gspo_proto.reward_pb2 import ResetRequest, ScoreRequest, StepRequest
from gspo_proto.rollout_pb2 import GroupTask, Rollout, Sampling, Scored
from tests.conftest import free_port
from tests.integration.security.secured_cluster import START_S, SecuredCluster, other_run_dir, secured_cluster, until
from tests.support.malformed_messages import malformed_payloads, messages
from tests.support.service_process import assert_on_loopback_alone, end
from tests.support.training.learner_feed import scored as scored_payload

pytestmark = pytest.mark.timeout(500)
ROOT = Path(__file__).parents[3]
# No group of this run has such a number.
FAR = 10**6
SCORED = Scored.FromString(scored_payload(FAR, 0, 0))
ROLLOUT: Rollout = SCORED.rollout.rollout
TASK = GroupTask(
    schema=1,
    group=FAR,
    attempt=1,
    num_rollouts=4,
    prompt=ROLLOUT.prompt,
    sampling=Sampling(temperature=1.0, max_tokens=8),
)
SAMPLE = SampleRequest(
    request_id="garbage", token_ids=[1, 2], sampling=Sampling(temperature=1.0, max_tokens=4, top_p=1)
)
PUSH = WeightFrame(header=PushHeader(run="another", epoch=1, version=1)).SerializeToString()
FRAME = WeightFrame(tensors=[TensorFrame(name="x", offset=1, num_elements=1, data=b"1234")])
NUM_OF_A_CALL = 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "held_out.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    sections = {
        "evaluation": {"prompts": str(folder / "held_out.jsonl"), "every": 5, "num_answers": 2},
        "run": {"total_steps": 1_000_000, "directory": str(folder)},
        "generation": {"max_rollouts": 16},
    }
    with secured_cluster(folder, **sections) as opened:
        yield opened


def test_a_wrong_redis_password_ends_a_service_with_one_line(cluster: SecuredCluster, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("another-password-of-redis")
    process = cluster.start("coordinator", other_run_dir(cluster, tmp_path, redis_password_file=tmp_path / "wrong"))
    assert process.wait(START_S) == 2
    (line,) = cluster.said("coordinator", "bad_input")
    assert line["reason"].startswith("services.redis_password_file: Redis does not take it (")
    assert "another-password" not in str(cluster.log("coordinator"))


def test_two_services_with_different_tokens_say_so_once_each(cluster: SecuredCluster, tmp_path: Path) -> None:
    cluster.start("learner")
    cluster.instance("learner")
    (tmp_path / "token").write_text("another-token-of-the-run")
    cluster.start("coordinator", other_run_dir(cluster, tmp_path, token_file=tmp_path / "token"))
    reason = "learner refuses our token: the secrets in services.token_file of both differ"
    assert (
        until(lambda: cluster.said("coordinator", "token_refused"), "the coordinator to say it")[0]["reason"] == reason
    )
    refusal = until(lambda: cluster.said("learner", "call_refused"), "the learner to say it")[0]
    assert (refusal["target"], refusal["reason"][:43]) == (
        "/gspo.Learner/Progress",
        "the shared token is missing or wrong: send ",
    )
    ready = cluster.get("coordinator", "/readyz")
    assert (ready.status_code, reason in ready.json()["problems"].values()) == (503, True)

    def asked_again() -> bool:
        page = cluster.get("learner", "/metrics").text
        return 'gspo_calls_refused_total{protocol="grpc",reason="token"} 1.0' not in page

    until(asked_again, "a second try")
    assert (len(cluster.said("coordinator", "token_refused")), len(cluster.said("learner", "call_refused"))) == (1, 1)
    cluster.processes["coordinator"].kill()
    cluster.processes["coordinator"].wait(10)


def test_they_meet_over_tls_and_take_nobody_without_the_token(cluster: SecuredCluster) -> None:
    for service in ("coordinator", "reward", "generation"):
        cluster.start(service)
    for service in cluster.processes:
        until(partial(_is_ready, cluster, service), f"{service} to be ready")
        address = cluster.instance(service)["http"]
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://{address}/readyz", trust_env=False)
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"https://{address}/readyz", trust_env=False)
    assert cluster.get("coordinator", "/v1/state").status_code == 401
    assert cluster.get("reward", "/v1/rewards").status_code == 401
    for service, method in (("learner", "/gspo.Learner/Progress"), ("generation", "/gspo.Generation/Describe")):
        with cluster.channel(service) as channel:
            assert _unary(channel, method)(b"", metadata=cluster.token, timeout=10)
            for shown in ((), (("authorization", "Bearer another-token-of-the-run"),)):
                with pytest.raises(grpc.RpcError) as refused:
                    _unary(channel, method)(b"", metadata=shown, timeout=10)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with grpc.insecure_channel(cluster.instance(service)["grpc"]) as plain, pytest.raises(grpc.RpcError):
            _unary(plain, method)(b"", metadata=cluster.token, timeout=2)


def test_the_command_line_finds_its_way(cluster: SecuredCluster) -> None:
    (cluster.config.run_dir / "environment.json").write_text("{}")
    for words, shown in ((["reward", "list", "--run"], "reward"), (["status"], "coordinator-0")):
        command = [sys.executable, "-m", "gspo.cli", *words, str(cluster.config.run_dir)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
        assert (done.returncode, shown in done.stdout) == (0, True), done.stdout + done.stderr


def commands() -> list[str]:
    """Every line of every block of shell in the document."""
    text = (ROOT / "docs/security.md").read_text()
    return [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


def test_every_command_of_the_document_works(cluster: SecuredCluster, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "redis-server").symlink_to(redis_executable())
    (programs / "gspo").symlink_to(Path(sys.executable).parent / "gspo")
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    fresh, there = tmp_path / "fresh", tmp_path / "there"
    fresh.mkdir()
    there.mkdir()
    (there / "secrets").symlink_to(cluster.secrets["token"].parent)
    ports = {"8080": cluster.instance("coordinator")["http"], "8081": cluster.instance("reward")["http"]}
    redis_port = free_port()
    for line in commands():
        command = line.replace("6379", str(redis_port))
        for named, address in ports.items():
            command = command.replace(f":{named}", f":{address.rpartition(':')[2]}")
        where = there if "localhost" in line else fresh
        if line.startswith("redis-server"):
            server = subprocess.Popen(command.split(), cwd=where, env=environment, stdout=subprocess.DEVNULL)
            password = (fresh / "secrets/redis-password").read_text().strip()
            until(partial(_pings, redis_port, password), "Redis")
            assert not _pings(redis_port, None)
            end(server)
            continue
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=where,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert len(commands()) == 7


def _pings(port: int, password: str | None) -> bool:
    try:
        return bool(Redis(port=port, password=password).ping())
    except RedisConnectionError:  # an AuthenticationError is one
        return False


def test_every_server_is_on_loopback_alone(cluster: SecuredCluster) -> None:
    for service, process in cluster.processes.items():
        instance = cluster.instance(service)
        assert_on_loopback_alone(process.pid, *filter(None, (instance["http"], instance["grpc"])))


def alone(payloads: st.SearchStrategy[bytes]) -> st.SearchStrategy[list[bytes]]:
    return payloads.map(lambda payload: [payload])


CALLS = {
    ("generation", "Generation/Generate"): alone(malformed_payloads(GenerateRequest(task=TASK))),
    ("generation", "Generation/Sample"): alone(malformed_payloads(SAMPLE)),
    ("generation", "Generation/PushWeights"): st.lists(malformed_payloads(FRAME), max_size=3).map(lambda p: [PUSH, *p]),
    ("generation", "Generation/Sleep"): alone(malformed_payloads(SleepRequest(run="another", epoch=1))),
    ("generation", "Generation/Describe"): alone(st.binary(max_size=40)),
    ("reward", "Reward/Score"): alone(malformed_payloads(ScoreRequest(rollouts=[ROLLOUT]))),
    ("reward", "Reward/ResetEnvironment"): alone(messages(ResetRequest.DESCRIPTOR).map(ResetRequest.SerializeToString)),
    ("reward", "Reward/StepEnvironment"): alone(messages(StepRequest.DESCRIPTOR).map(StepRequest.SerializeToString)),
    ("learner", "Learner/Progress"): alone(st.binary(max_size=40)),
    ("learner", "Learner/Results"): alone(messages(ResultsRequest.DESCRIPTOR).map(ResultsRequest.SerializeToString)),
    # Every readable message asks for a checkpoint; these bytes are not readable.
    ("learner", "Learner/Checkpoint"): st.just([b"\xff"]),
}


def _is_ready(cluster: SecuredCluster, service: str) -> bool:
    return cluster.get(service, "/readyz").status_code == 200


def _unary(channel: grpc.Channel, method: str) -> Any:
    """A call of plain bytes, which has no message types."""
    return channel.unary_unary(method)


def call(cluster: SecuredCluster, channel: grpc.Channel, method: str, payloads: list[bytes]) -> grpc.StatusCode:
    """How a call with these messages ends."""
    stream: Any = channel.stream_stream(f"/gspo.{method}")
    opened = stream(iter(payloads), metadata=cluster.token, timeout=START_S)
    try:
        for _ in opened:
            continue
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_every_call_has_its_garbage() -> None:
    doors = (generation_pb2, learner_pb2, reward_pb2)
    services = [service for file in doors for service in file.DESCRIPTOR.services_by_name.values()]
    methods = {f"{one.name}/{method.name}" for one in services for method in one.methods}
    # A learner's other ranks serve this one: tests/integration/push/test_shares.py.
    assert methods - {"Shares/Pull"} == {method for _, method in CALLS}


@pytest.mark.parametrize(("service", "method"), CALLS)
def test_garbage_in_a_call_is_refused_and_counted(cluster: SecuredCluster, service: str, method: str) -> None:
    with cluster.channel(service) as channel:

        @settings(
            max_examples=NUM_OF_A_CALL, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None
        )
        @given(payloads=CALLS[service, method])
        def refused(payloads: list[bytes]) -> None:
            code = call(cluster, channel, method, payloads)
            assert code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), payloads

        refused()
        assert call(cluster, channel, method, [b"\xff"]) is grpc.StatusCode.INVALID_ARGUMENT
        too_large = call(cluster, channel, method, [bytes(MAX_ENTRY_BYTES + 1)])
        assert too_large is grpc.StatusCode.RESOURCE_EXHAUSTED
    page = cluster.get(service, "/metrics").text
    assert 'gspo_calls_refused_total{protocol="grpc",reason="undecodable"}' in page
    assert 'gspo_calls_refused_total{protocol="grpc",reason="too_large"}' in page


def test_a_call_of_another_schema_is_told_so(cluster: SecuredCluster) -> None:
    of_later = ScoreRequest(rollouts=[Rollout(schema=2)]).SerializeToString()
    said = "schema 2, and this version reads 1"
    with cluster.channel("reward") as channel, pytest.raises(grpc.RpcError, match=said):
        _unary(channel, "/gspo.Reward/Score")(of_later, metadata=cluster.token, timeout=10)
    assert 'gspo_calls_refused_total{protocol="grpc",reason="schema"}' in cluster.get("reward", "/metrics").text


def test_no_secret_is_in_a_log_or_on_a_command_line(cluster: SecuredCluster) -> None:
    words = [cluster.secrets[name].read_text().strip() for name in ("token", "redis-password")]
    logs = "".join(path.read_text() for path in cluster.config.run_dir.rglob("*.log"))
    commands = " ".join(str(process.args) for process in cluster.processes.values())
    config = (cluster.config.run_dir / "config.yaml").read_text()
    assert logs
    assert not [word for word in words if word in logs + commands + config]
