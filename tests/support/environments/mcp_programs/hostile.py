"""A server that breaks a rule of MCP, by the kind that is its argument."""

import json
import subprocess
import sys
import time
from typing import Any

KIND = sys.argv[1]
# In a session of its own, and with no end by itself.
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


def write(text: str) -> None:
    """Write a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def answer(message: dict[str, Any], result: dict[str, Any]) -> None:
    """Answer a request."""
    write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}))


def call(message: dict[str, Any]) -> None:
    """Answer a call, or do not."""
    if KIND == "endless":
        sys.stdout.write(f'{{"jsonrpc": "2.0", "id": {message["id"]}, "result": "')
        while True:
            sys.stdout.write("x" * 2**20)
    if KIND == "noisy":
        write("a library prints this")
    if KIND == "forks":
        subprocess.Popen(SLEEPER, start_new_session=True)
    answer(message, {"content": "three" if KIND == "wrong_result" else [{"type": "text", "text": "3"}]})


def serve() -> None:
    """Answer until the input ends."""
    tools = [] if KIND == "empty" else [{"name": "add", "inputSchema": {"type": "object"}}]
    for line in sys.stdin:
        message = json.loads(line)
        method = message.get("method")
        if method == "initialize":
            version = message["params"]["protocolVersion"]
            info = {"name": "hostile", "version": "1"}
            answer(message, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
        elif method == "tools/list":
            more = {"nextCursor": "more"} if KIND == "empty_pages" else {}
            answer(message, {"tools": "none" if KIND == "wrong_list" else [] if more else tools, **more})
        elif method == "tools/call":
            call(message)


if KIND == "ends":
    sys.exit("it needs a key")
if KIND != "silent":
    serve()
time.sleep(600)
