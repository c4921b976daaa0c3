"""Every recipe with small sizes and a tiny random model: `gspo doctor`, and two steps by `gspo run`.

What it is not: a lesson; rewards of a random model are mostly 0.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.gspo_run import run_to_end
from tests.support.tiny_model import make_tiny_model, make_tokenizer

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
ROOT = Path(__file__).parents[3]
RECIPES = sorted(path.parent for path in ROOT.glob("examples/recipes/*/config.yaml"))
STEPS = 2
SMALL: dict[str, dict[str, Any]] = {
    "algorithm": {
        "rollout_batch_size": 2,
        "num_return_sequences_in_group": 2,
        "prompt_length": 384,
        "response_length": 48,
        "num_mini_batches": 1,
    },
    "generation": {"kv_cache_gb": 0.25, "max_rollouts": 8, "threads": 1},
    "learner": {"threads": 1},
    "run": {"total_steps": STEPS, "checkpoint_every": 1, "directory": "runs"},
}
# The template writes the tools into every prompt.
TOOLS = {"environment": {"max_turns": 2, "turn_tokens": 16}, "algorithm": {"prompt_length": 1536}}
# Further sizes, by recipe.
SMALLER: dict[str, dict[str, dict[str, Any]]] = {
    "long_answers": {"algorithm": {"overlong_buffer": 16}, "generation": {"segment_tokens": 24}},
    "conversation": {"environment": {"max_turns": 2, "turn_tokens": 8}},
    "mcp": TOOLS,
    "tools": TOOLS,
}
# A judge of OpenAI's form that rates by the length of the question.
JUDGE = """
import sys
import uvicorn
from fastapi import FastAPI

app = FastAPI()


@app.post("/v1/chat/completions")
async def on_question(body: dict):
    rating = len(body["messages"][0]["content"]) % 11
    return {"choices": [{"message": {"role": "assistant", "content": str(rating)}}]}


uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]))
"""


def free_port() -> int:
    """A port without a listener."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


@contextmanager
def server(command: list[str | Path], port: int, **variables: str) -> Iterator[None]:
    """A process that listens on a port, until the end of the block."""
    process = subprocess.Popen(command, env={**os.environ, **variables})
    try:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait(10)


def smaller(recipe: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A copy of a recipe with the tiny model and small sizes."""
    shutil.copytree(recipe, folder, dirs_exist_ok=True)
    config = yaml.safe_load((recipe / "config.yaml").read_text())
    tokenizer = make_tokenizer()
    if recipe.name in ("mcp", "tools"):
        tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + tokenizer.chat_template
    make_tiny_model(folder / "model", num_experts=4 if recipe.name == "moe" else 0, scale=2.0, tokenizer=tokenizer)
    config["model"] = {"path": "model"}
    config.pop("placement", None)  # shared GPUs need a GPU
    for sections in (SMALL, SMALLER.get(recipe.name, {})):
        for name, keys in sections.items():
            config[name] = {**config.get(name, {}), **keys}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml", config


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_two_steps(recipe: Path, tmp_path: Path) -> None:
    file, config = smaller(recipe, tmp_path / "recipe")
    gspo: list[str | Path] = [sys.executable, "-P", "-m", "gspo.cli"]
    run_to_end([*gspo, "doctor", file])
    command = [*gspo, "run", file, "--plain"]
    if recipe.name == "judge":
        judge_port, port = free_port(), free_port()
        config["reward"]["functions"][0]["url"] = f"http://127.0.0.1:{port}/reward"
        file.write_text(yaml.safe_dump(config))
        variables = {
            "JUDGE_URL": f"http://127.0.0.1:{judge_port}/v1",
            "JUDGE_MODEL": "judge",
            "JUDGE_PORT": str(port),
            "JUDGE_REQUESTS_PER_MINUTE": "600",
        }
        judge: list[str | Path] = [sys.executable, "-c", JUDGE, str(judge_port)]
        limits: list[str | Path] = [sys.executable, recipe / "judge_server.py"]
        with server(judge, judge_port), server(limits, port, **variables):
            run_to_end(command)
    else:
        run_to_end(command)
    (summary,) = file.parent.glob("runs/*/summary.json")
    assert json.loads(summary.read_text())["end"] == "completed"
    assert len((summary.parent / "log/metrics.jsonl").read_text().splitlines()) == STEPS
