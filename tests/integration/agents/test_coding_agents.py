"""Coding agents, unchanged, play rollouts: their requests are taken, and captured token for token.

The requests of the first tests have the shape that these programs were seen to send. The long ones install the programs
by npm and run them in the run's own sandboxes, which reach the gateway alone.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from gspo.common.config.engines import GenerationConfig
from gspo.generation.engine.staging import PolicyCopies
from gspo.generation.engine.vllm_engine import Engine, engine_arguments
from gspo_proto.rollout_pb2 import Prompt, Rollout
from tests.integration.generation.conftest import SharedEngine
from tests.integration.generation.test_agents import Player, assert_log_probs, branches, started_run
from tests.integration.generation.test_run_agents import playing
from tests.support.agents.long_model import PromptedEngine, make_long_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
LENGTHS = {"prompt_length": 40_000, "response_length": 4000, "rollout_length": 100_000}
# The name that each program gives its shell.
SHELLS = {"claude": "Bash", "opencode": "bash"}
FILES = {
    "claude": ("@anthropic-ai/claude-code@2.1.197", "@anthropic-ai/claude-code-linux-x64/claude"),
    "opencode": ("opencode-ai@1.18.33", "opencode-linux-x64/bin/opencode"),
}
ASKED, WRITTEN, LAST = "Write 4711 to the file out.txt.", "echo 4711 > out.txt && cat out.txt", "The file is written."


@dataclass(frozen=True)
class Script:
    """Answers with one call of the shell, then with a text; to a sub-agent and a title with a text alone."""

    shell: str

    def __call__(self, prompt: str) -> str:
        """The answer."""
        asked = prompt.rpartition("<|im_start|>assistant")[0]
        if "a title" in prompt[:2000] or "<tool_call>\n{" in asked.rpartition("<|im_start|>user\n")[2]:
            return LAST
        if self.shell not in prompt or asked.rstrip().endswith("4711\n<|im_end|>") or "\n4711" in asked[-200:]:
            return LAST
        call = {"name": self.shell, "arguments": {"command": WRITTEN, "description": "write"}}
        return f"I write it.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


@contextmanager
def scripted(folder: Path, shell: str) -> Iterator[tuple[SharedEngine, PreTrainedTokenizerFast]]:
    """A scripted engine in place of one with weights."""
    model, tokenizer = make_long_model(folder)
    copies = PolicyCopies.from_folder(model, "float32")
    yield SharedEngine(PromptedEngine(tokenizer, Script(shell)), copies, [model]), tokenizer  # type: ignore[arg-type]
    copies.close()


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def cached(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


def claude_request(*messages: Any, bill: int) -> dict[str, Any]:
    """A request in the shape of Claude Code's."""
    schema = {"type": "object", "properties": {"command": {"type": "string"}}, "additionalProperties": False}
    tools = [{"name": name, "description": f"{name} does it.", "input_schema": schema} for name in ("Bash", "Read")]
    return {
        "model": "policy",
        "max_tokens": 32_000,
        "stream": True,
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.0.{bill}; cc_entrypoint=cli;"},
            cached("You are a program that writes programs."),
            cached("Rules. " * 2000),
        ],
        "messages": list(messages),
        "tools": tools,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": '{"device_id": "0", "session_id": "1"}'},
    }


CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "x-app": "cli",
    "x-stainless-retry-count": "0",
}


def replied(stream: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The blocks of an answer of Anthropic's API, put together from its events, and its end."""
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for event in stream:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            arguments = ""
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
            blocks[-1]["text"] = blocks[-1].get("text", "") + event["delta"]["text"]
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            arguments += event["delta"]["partial_json"]
        elif event["type"] == "content_block_stop" and arguments:
            blocks[-1]["input"], arguments = json.loads(arguments), ""
    return blocks, next(event for event in stream if event["type"] == "message_delta")["delta"]


async def ask_claude(worker: Player, body: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    headers = {**CLAUDE_HEADERS, "x-api-key": worker.lease["key"]}
    reply = await worker.http.post("/v1/messages?beta=true", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return replied(events(reply.text))


async def test_requests_of_the_shape_of_claude_codes_are_one_conversation(redis_url: str, tmp_path: Path) -> None:
    with scripted(tmp_path / "model", "Bash") as (shared, tokenizer):
        sections: dict[str, Any] = {"algorithm": LENGTHS, "gateway": {"tool_parser": "hermes"}}
        async with started_run(shared, redis_url, tmp_path / "run", **sections) as run:
            await run.issue()
            worker = await run.lease()
            async with httpx.AsyncClient(base_url=worker.http.base_url) as without_key:
                assert (await without_key.head("/")).status_code == 200
                assert (await without_key.get("/v1/models")).status_code == 401
            reminder = {"role": "system", "content": "Kinds of agents: one."}
            first: dict[str, Any] = {"role": "user", "content": [cached("The date."), cached(ASKED)]}
            body = claude_request(first, reminder, bill=1)
            count = {key: body[key] for key in ("model", "system", "messages", "tools", "thinking")}
            headers = {**CLAUDE_HEADERS, "authorization": f"Bearer {worker.lease['key']}"}
            counted = await worker.http.post("/v1/messages/count_tokens?beta=true", json=count, headers=headers)
            (text, call), end = await ask_claude(worker, body)
            assert (call["name"], call["input"]["command"], end["stop_reason"]) == ("Bash", WRITTEN, "tool_use")
            plain: dict[str, Any] = {
                "role": "user",
                "content": [{**block, "cache_control": None} for block in first["content"]],
            }
            for block in plain["content"]:
                del block["cache_control"]
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": "4711", "is_error": False}
            history = [
                plain,
                reminder,
                {"role": "assistant", "content": [text, call]},
                {"role": "user", "content": [{**result, "cache_control": {"type": "ephemeral"}}]},
                {"role": "system", "content": "A reminder within the conversation."},
            ]
            (answer,), end = await ask_claude(worker, claude_request(*history, bill=2))
            assert (answer["text"], end["stop_reason"]) == (LAST, "end_turn")
            await worker.finish()
            rollout = await run.rollout()
    assert counted.json()["input_tokens"] == len(rollout.prompt.token_ids) > 4000
    assert (rollout.num_turns, list(rollout.branch_starts), rollout.text) == (2, [], LAST)
    check_tokens(rollout, tokenizer)


async def test_requests_of_the_shape_of_opencodes_are_a_conversation_and_a_title(
    redis_url: str, tmp_path: Path
) -> None:
    with scripted(tmp_path / "model", "bash") as (shared, tokenizer):
        sections: dict[str, Any] = {"algorithm": LENGTHS, "gateway": {"tool_parser": "hermes"}}
        async with started_run(shared, redis_url, tmp_path / "run", **sections) as run:
            await run.issue()
            worker = await run.lease()

            async def ask(*messages: Any, **more: Any) -> list[dict[str, Any]]:
                body = {"model": "policy", "max_tokens": 32_000, "messages": list(messages), "stream": True, **more}
                body["stream_options"] = {"include_usage": True}
                headers = {"authorization": f"Bearer {worker.lease['key']}", "x-session-affinity": "ses_1"}
                reply = await worker.http.post("/v1/chat/completions", json=body, headers=headers)
                assert reply.status_code == 200, reply.text
                return [event["choices"][0]["delta"] for event in events(reply.text) if event["choices"]]

            await ask({"role": "system", "content": "You write a title."}, {"role": "user", "content": ASKED})
            schema = {"type": "object", "properties": {"command": {"type": "string"}}}
            function = {"name": "bash", "description": "Runs it.", "parameters": schema}
            tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "auto"}
            history: list[Any] = [{"role": "system", "content": "Rules. " * 500}, {"role": "user", "content": ASKED}]
            deltas = await ask(*history, **tools)
            calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
            arguments = "".join(call["function"].get("arguments") or "" for call in calls)
            call = {"id": calls[0]["id"], "type": "function", "function": {"name": "bash", "arguments": arguments}}
            content = "".join(delta.get("content") or "" for delta in deltas)
            history += [{"role": "assistant", "content": content, "tool_calls": [call]}]
            history += [{"role": "tool", "tool_call_id": call["id"], "content": "4711\n"}]
            await ask(*history, **tools)
            await worker.finish()
            rollout = await run.rollout()
    assert (rollout.num_turns, len(rollout.branch_starts), rollout.text) == (3, 1, LAST)
    assert "title" not in tokenizer.decode(list(rollout.prompt.token_ids))
    check_tokens(rollout, tokenizer)


def check_tokens(rollout: Rollout, tokenizer: PreTrainedTokenizerFast) -> None:
    """The policy's turns are those of the script, each with the end that it sampled."""
    sampled: list[str] = []
    for tokens, mask, _ in branches(rollout):
        text, before = list[int](), 0
        for token, counts in zip(tokens, mask, strict=True):
            if counts and not before:
                text = []
            if before and not counts:
                sampled.append(tokenizer.decode(text))
            text, before = [*text, token] if counts else text, counts
        if before:
            sampled.append(tokenizer.decode(text))
    assert len(sampled) == rollout.num_turns
    assert all(text.endswith("<|im_end|>") and text.count("<|im_end|>") == 1 for text in sampled)
    assert sum("<tool_call>" in text and WRITTEN in text for text in sampled) == 1


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The programs of npm's packages."""
    assert shutil.which("npm"), "npm is missing: install Node.js (Debian: apt-get install npm)"
    folder, packages = tmp_path_factory.mktemp("npm"), [package for package, _ in FILES.values()]
    command = ["npm", "install", "--no-fund", "--no-audit", "--ignore-scripts", "--prefix", str(folder), *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return {name: folder / "node_modules" / file for name, (_, file) in FILES.items()}


ENDS = """
test "$(cat out.txt 2> /dev/null)" = 4711 && echo 1 > "$GSPO_REWARD_FILE" || echo 0 > "$GSPO_REWARD_FILE"
"""
PLAYS = {
    "claude": """
export ANTHROPIC_MODEL=$GSPO_MODEL ANTHROPIC_DEFAULT_HAIKU_MODEL=$GSPO_MODEL
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
./claude -p "$ASKED" --allowedTools Bash < /dev/null || $ELSE
""",
    "opencode": """
cat > opencode.json << END
{"provider": {"gspo": {"npm": "@ai-sdk/openai-compatible", "models": {"$GSPO_MODEL": {}},
  "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"}}},
 "model": "gspo/$GSPO_MODEL", "permission": {"*": "allow"}, "autoupdate": false}
END
export OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_LSP_DOWNLOAD=1
./opencode run "$ASKED" < /dev/null || $ELSE
""",
}


def play_file(folder: Path, name: str, otherwise: str) -> Path:
    path = folder / "play.sh"
    path.write_text(f"ASKED='{ASKED}' ELSE='{otherwise}'\n{PLAYS[name]}{ENDS}")
    return path


async def played(
    shared: SharedEngine, redis_url: str, tmp_path: Path, name: str, program: Path, otherwise: str = "exit 3"
) -> Rollout:
    """A rollout that the program has played in a sandbox of the run; `otherwise` is what follows where it fails."""
    sections: dict[str, Any] = {"algorithm": LENGTHS, "gateway": {"tool_parser": "hermes"}}
    agent: dict[str, Any] = {
        "command": ["sh", "play.sh"],
        "reads": [str(play_file(tmp_path, name, otherwise)), str(program)],
        "workers": 1,
    }
    agent |= {"answer_tokens": 400, "lease_s": 300.0, "memory_mb": 8192}
    async with playing(shared, redis_url, tmp_path / "run", sections=sections, **agent) as (run, _):
        prompt = Prompt(token_ids=[5], text=ASKED, messages_json="[]", columns_json="{}")
        await run.issue(prompt=prompt, max_tokens=LENGTHS["response_length"])
        return Rollout.FromString(await run.next_entry(run.keys.rollouts, bytes, timeout_s=300.0))


@pytest.mark.long
@pytest.mark.parametrize("name", list(PLAYS))
async def test_a_coding_agent_plays_in_a_sandbox(
    redis_url: str, tmp_path: Path, programs: dict[str, Path], name: str
) -> None:
    with scripted(tmp_path / "model", SHELLS[name]) as (shared, tokenizer):
        rollout = await played(shared, redis_url, tmp_path, name, programs[name])
    assert (rollout.episode.failure, rollout.episode.reward) == ("", 1.0)
    assert rollout.text == LAST
    assert len(rollout.prompt.token_ids) > 5000
    check_tokens(rollout, tokenizer)


@pytest.mark.long
async def test_a_coding_agent_of_a_real_engine(redis_url: str, tmp_path: Path, programs: dict[str, Path]) -> None:
    """A random policy writes no call, and every token has its log-prob.

    The agent ends with its text. Or the text was cut: it asks for the rest, three times, and fails.
    """
    model, _ = make_long_model(tmp_path / "model")
    longest = LENGTHS["prompt_length"] + LENGTHS["response_length"]
    arguments = engine_arguments(model, GenerationConfig(max_rollouts=4, kv_cache_gb=0.5), max_model_len=longest)
    engine, copies = await Engine.start(arguments), PolicyCopies.from_folder(model, "float32")
    try:
        shared = SharedEngine(engine, copies, [model])
        rollout = await played(shared, redis_url, tmp_path, "claude", programs["claude"], otherwise="true")
    finally:
        await engine.stop()
        copies.close()
    assert (rollout.episode.failure, rollout.episode.reward) == ("", 0.0)
    assert_log_probs(rollout, {engine.version: model}, rollout.temperature)
