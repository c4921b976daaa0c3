"""Sessions on MCP servers, over stdio and streamable HTTP: tools that fail are answers, servers that fail are troubles.

The servers are those of the package `mcp`, and hostile ones written by hand. No engine: conversations are in
test_mcp_conversations.py.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from gspo.common.config.reward import EnvironmentConfig
from gspo.common.telemetry import metrics
from gspo.environments.mcp.mcp_sessions import McpSessions
from gspo.environments.mcp.stdio_streams import MAX_MESSAGE_BYTES
from gspo.environments.server_environment import ServerEnvironment
from gspo.environments.session_server import ServerTroubleError
from gspo_proto.reward_pb2 import ResetRequest, StepRequest
from tests.support.environments.mcp_server import command, http_server

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http_server() as (address, _):
        yield address


@pytest.fixture(params=["stdio", "http"])
def server(request: pytest.FixtureRequest) -> dict[str, Any]:
    return command() if request.param == "stdio" else {"url": request.getfixturevalue("url")}


def environment_of(mcp: dict[str, Any], **keys: Any) -> EnvironmentConfig:
    return EnvironmentConfig.model_validate({"mcp": {"timeout_s": 20.0, **mcp}, "reach_timeout_s": 30.0, **keys})


@asynccontextmanager
async def sessions_of(mcp: dict[str, Any], minimum: Any = "bubblewrap") -> AsyncIterator[McpSessions]:
    sessions = McpSessions(environment_of(mcp), minimum)
    try:
        yield sessions
    finally:
        await sessions.aclose()


async def called(sessions: McpSessions, session: str, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    """The answers to the calls of a turn."""
    action = {"text": "", "calls": [{"name": name, "arguments": arguments} for name, arguments in calls]}
    turn = await sessions.step(session, 1, action)
    assert not turn.done
    assert [(message["role"], message["name"]) for message in turn.observation] == [("tool", name) for name, _ in calls]
    return [message["content"] for message in turn.observation]


def num_errors(tool: str, kind: str) -> float:
    value = metrics.BY_SERVICE["generation"].get_sample_value
    return value("gspo_tool_errors_total", {"tool": tool, "kind": kind}) or 0.0


def descendants() -> list[psutil.Process]:
    return [
        child for child in psutil.Process().children(recursive=True) if {"tools.py", "hostile.py"} & {*child.cmdline()}
    ]


async def gone(processes: list[psutil.Process], patience_s: float = 20.0) -> bool:
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        if not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
            return True
        await asyncio.sleep(0.05)
    return False


async def test_calls_are_answered_in_their_order_and_a_turn_without_one_is_the_last(server: dict[str, Any]) -> None:
    async with sessions_of(server) as sessions:
        await sessions.reset("a", {})
        texts = await called(sessions, "a", ("add", {"a": 2, "b": 3}), ("count", {}), ("count", {}))
        assert texts == ["5", "1", "2"]
        assert (await sessions.step("a", 2, {"text": "5", "calls": []})).done


async def test_each_rollout_has_a_session_of_its_own_and_shared_ones_have_one(server: dict[str, Any]) -> None:
    async with sessions_of(server) as sessions:
        for session in ("a", "b"):
            await sessions.reset(session, {})
            assert await called(sessions, session, ("count", {})) == ["1"]
    async with sessions_of(server | {"per": "shared"}) as sessions:
        for session in ("a", "b"):
            await sessions.reset(session, {})
        assert [await called(sessions, session, ("count", {})) for session in ("a", "b")] == [["1"], ["2"]]
        await sessions.close("a")
        assert await called(sessions, "b", ("count", {})) == ["3"]


async def test_what_a_tool_does_wrong_is_an_answer_to_the_policy(server: dict[str, Any]) -> None:
    kinds = (("repeat", "cut"), ("sleep", "timeout"), ("fail", "error"), ("repeat", "error"))
    before = [num_errors(*kind) for kind in kinds]
    async with sessions_of(server | {"timeout_s": 3.0, "max_result_chars": 100}) as sessions:
        await sessions.reset("a", {})
        assert await called(sessions, "a", ("fail", {"reason": "no such city"})) == [
            "error: Error executing tool fail: no such city"
        ]
        wrong = await called(sessions, "a", ("add", {"a": "x", "b": 1}))
        assert wrong[0].startswith("error: Error executing tool add")
        assert await called(sessions, "a", ("nothing", {})) == ["error: Unknown tool: nothing"]
        assert await called(sessions, "a", ("sleep", {"seconds": 60})) == ["error: no result within 3 s"]
        assert await called(sessions, "a", ("repeat", {"text": "x", "times": 150})) == [
            f"{'x' * 100}... (150 characters)"
        ]
        # More than a generator keeps in memory: the server is asked on as if it had refused the call.
        huge = {"text": "x", "times": MAX_MESSAGE_BYTES + 1}
        async with asyncio.timeout(60):
            refused = await called(sessions, "a", ("repeat", huge))
        assert refused[0].startswith("error: ")
        assert await called(sessions, "a", ("add", {"a": 2, "b": 3})) == ["5"]
    assert [num_errors(*kind) - num for kind, num in zip(kinds, before, strict=True)] == [1, 1, 1, 1]


async def test_a_server_that_dies_ends_the_attempt_at_once_and_its_processes_are_gone() -> None:
    environment = ServerEnvironment(environment_of(command()), McpSessions(environment_of(command()), "bubblewrap"))
    begun = await environment.begin(ResetRequest(task_json="{}"), 60.0)
    processes, began_s = descendants(), time.monotonic()
    assert processes
    die = StepRequest(state_json=begun.state_json, calls_json=json.dumps([{"name": "die", "arguments": {}}]))
    failure = (await environment.step(die, 60.0, "{}")).failure
    assert failure.kind == "environment_unreachable"
    assert "has ended the connection" in failure.text
    assert time.monotonic() - began_s < 30.0, "it was asked again for reach_timeout_s"
    environment.end(begun.state_json)
    await environment.aclose()
    assert await gone(processes)


async def test_a_shared_server_that_dies_is_started_again_and_asked_again() -> None:
    shared = command() | {"per": "shared"}
    async with sessions_of(shared) as sessions:
        environment = ServerEnvironment(environment_of(shared), sessions)
        begun = await environment.begin(ResetRequest(task_json="{}"), 60.0)
        (pid,) = sessions.pids
        os.killpg(pid, signal.SIGKILL)
        add = json.dumps([{"name": "add", "arguments": {"a": 2, "b": 3}}])
        reply = await environment.step(StepRequest(state_json=begun.state_json, calls_json=add), 60.0, "{}")
        assert json.loads(reply.observation_json)[0]["content"] == "5"
        # Another generator continues it: there is no state that it lacks.
        async with sessions_of(shared) as others:
            other = ServerEnvironment(environment_of(shared), others)
            assert not (await other.resume(reply.state_json, "{}")).HasField("failure")
            again = await other.step(StepRequest(state_json=reply.state_json, calls_json=add), 60.0, "{}")
            assert json.loads(again.observation_json)[0]["content"] == "5"


async def test_a_session_of_a_rollouts_own_does_not_move_to_another_generator() -> None:
    async with sessions_of(command()) as sessions:
        other = ServerEnvironment(environment_of(command()), sessions)
        state = json.dumps({"episode_id": "of-another", "step_count": 1})
        assert (await other.resume(state, "{}")).failure.kind == "session_lost"


async def test_an_http_server_that_ends_is_unreachable() -> None:
    with http_server() as (address, process):
        async with sessions_of({"url": address}) as sessions:
            await sessions.reset("a", {})
            process.kill()
            process.wait()
            with pytest.raises(ServerTroubleError) as error:
                await called(sessions, "a", ("add", {"a": 2, "b": 3}))
            assert (error.value.kind, error.value.is_final) == ("environment_unreachable", True)
            with pytest.raises(ServerTroubleError, match="ConnectError") as error:
                await sessions.reset("b", {})
            assert (error.value.kind, error.value.is_final) == ("environment_unreachable", False)


@pytest.mark.long
async def test_a_session_that_an_http_server_forgot_is_lost() -> None:
    with http_server() as (address, process):
        async with sessions_of({"url": address}) as sessions, sessions_of({"url": address, "per": "shared"}) as shared:
            await sessions.reset("a", {})
            await shared.reset("a", {})
            process.kill()
            process.wait()
            with http_server(port=int(address.split(":")[2].split("/")[0])):
                with pytest.raises(ServerTroubleError) as error:
                    await called(sessions, "a", ("add", {"a": 2, "b": 3}))
                assert error.value.kind == "session_lost"
                environment = ServerEnvironment(environment_of({"url": address, "per": "shared"}), shared)
                add = json.dumps([{"name": "add", "arguments": {"a": 2, "b": 3}}])
                state = json.dumps({"episode_id": "a", "step_count": 0})
                reply = await environment.step(StepRequest(state_json=state, calls_json=add), 60.0, "{}")
                assert json.loads(reply.observation_json)[0]["content"] == "5", reply.failure.text


@pytest.mark.parametrize(
    ("kind", "text_part"),
    [
        ("wrong_result", "error: the server's answer breaks the protocol"),
        ("noisy", "3"),
        ("endless", "error: the result has more than 4194304 bytes"),
    ],
)
async def test_a_hostile_server_harms_no_more_than_its_call(kind: str, text_part: str) -> None:
    async with sessions_of(command(kind)) as sessions:
        await sessions.reset("a", {})
        memory = psutil.Process().memory_info().rss
        (text,) = await called(sessions, "a", ("add", {}))
        assert text.startswith(text_part)
        assert psutil.Process().memory_info().rss - memory < 2**28
        processes = descendants()
        await sessions.close("a")
        assert await gone(processes)


async def test_an_answer_that_unpacks_to_more_than_its_bytes_is_refused() -> None:
    bomb = gzip.compress(bytes(2**28))
    head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-type: application/json\r\ncontent-length: {len(bomb)}"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(f"{head}\r\n\r\n".encode() + bomb)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    memory = psutil.Process().memory_info().rss
    async with sessions_of({"url": address}) as sessions:
        with pytest.raises(ServerTroubleError, match="encoded as gzip"):
            await sessions.reset("a", {})
    assert psutil.Process().memory_info().rss - memory < 2**26
    server.close()


@pytest.mark.parametrize(
    ("kind", "text_part"), [("ends", "its last words: it needs a key"), ("silent", "handshake within 3 s")]
)
async def test_a_server_that_does_not_begin_is_unreachable_with_its_last_words(kind: str, text_part: str) -> None:
    sessions = McpSessions(environment_of(command(kind), reach_timeout_s=3.0), "bubblewrap")
    with pytest.raises(ServerTroubleError) as error:
        await sessions.reset("a", {})
    assert error.value.kind == "environment_unreachable"
    assert text_part in str(error.value)
    assert await gone(descendants())
    await sessions.aclose()


async def test_a_command_that_is_not_there_is_named() -> None:
    async with sessions_of({"command": ["no-such-program"]}) as sessions:
        with pytest.raises(ServerTroubleError, match="no-such-program cannot be started: No such file"):
            await sessions.reset("a", {})


async def test_a_command_reads_its_files_and_no_others_and_reaches_no_address(tmp_path: Path, url: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the user")
    async with sessions_of(command() | {"memory_mb": 512}) as sessions:
        await sessions.reset("a", {})
        assert "open files" in (limits := (await called(sessions, "a", ("look", {"path": "/proc/self/limits"})))[0])
        assert str(512 * 2**20) in next(line for line in limits.splitlines() if line.startswith("Max data size"))
        assert "A server of the package" in (await called(sessions, "a", ("look", {"path": "tools.py"})))[0]
        assert (await called(sessions, "a", ("look", {"path": str(secret)})))[0].startswith("error: ")
        environ = (await called(sessions, "a", ("look", {"path": "/proc/self/environ"})))[0]
        assert {part.partition("=")[0] for part in environ.split("\0") if part} <= {
            "PATH", "LANG", "HOME", "TMPDIR", "USER", "PYTHONUNBUFFERED", "PWD", "LC_CTYPE",
            "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS",
        }  # fmt: skip
        routes = (await called(sessions, "a", ("look", {"path": "/proc/net/route"})))[0]
        assert len(routes.splitlines()) == 1, "only the head of the table: there is no way out"


@pytest.mark.parametrize("kind", ["memory", "sockets"])
async def test_a_server_with_too_much_memory_ends_with_all_its_processes(kind: str) -> None:
    async with sessions_of(command(kind) | {"memory_mb": 512}) as sessions, sessions_of(command("noisy")) as others:
        await others.reset("b", {})
        await sessions.reset("a", {})
        with pytest.raises(ServerTroubleError) as error:
            await called(sessions, "a", ("add", {}))
        assert error.value.kind == "environment_unreachable"
        assert await called(others, "b", ("add", {})) == ["3"]


async def test_empty_files_of_a_server_have_a_bound() -> None:
    async with sessions_of(command("files")) as sessions:
        await sessions.reset("a", {})
        assert await called(sessions, "a", ("add", {})) == ["True"]


@pytest.mark.parametrize("minimum", ["bubblewrap", "rlimits"])
@pytest.mark.parametrize("cut", [pytest.param("close", marks=pytest.mark.long), "cancel", "kill"])
async def test_no_process_is_left_whatever_cuts_a_session(
    cut: str, minimum: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`kill`: the generator's process gets SIGKILL, in the midst of a call."""
    if minimum == "rlimits":
        (tmp_path / "bin").mkdir()
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}")  # without bwrap
    kind = "noisy" if minimum == "rlimits" else "forks"
    program = [sys.executable, "-c", HOLDER, json.dumps(command(kind)), minimum, cut]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    holder = await asyncio.create_subprocess_exec(*program, env=environment, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    while (line := await holder.stdout.readline()) != b"ready\n":
        assert line, "it has ended"
    processes = psutil.Process(holder.pid).children(recursive=True)
    assert len(processes) >= (2 if minimum == "rlimits" else 6), "two sessions, and what they started"
    if cut == "kill":
        holder.kill()
    else:
        holder.send_signal(signal.SIGUSR1)
    await holder.wait()
    assert await gone(processes)


# A stand-in for a generator: two sessions, whose processes it ends as `cut` says.
HOLDER = """
import asyncio, json, signal, sys
from gspo.common.config.reward import EnvironmentConfig
from gspo.environments.mcp.mcp_sessions import McpSessions

async def main():
    mcp, minimum, cut = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
    sessions = McpSessions(EnvironmentConfig(mcp=mcp, reach_timeout_s=60), minimum)
    go_on = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, go_on.set)
    calls = {"calls": [{"name": "add", "arguments": {}}]}
    for session in "ab":
        await sessions.reset(session, {})
    steps = [asyncio.create_task(sessions.step(session, 1, calls)) for session in "ab"]
    await asyncio.wait(steps, timeout=2.0)
    print("ready", flush=True)
    await go_on.wait()
    for step in steps:
        step.cancel()
    if cut == "close":
        for session in "ab":
            await sessions.close(session)
    await sessions.aclose()

asyncio.run(main())
"""
