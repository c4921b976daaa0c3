"""A server that breaks a rule of MCP, by the kind that is its argument."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

KIND = sys.argv[1]
RANDOM = random.Random(sys.argv[2] if len(sys.argv) > 2 else 0)  # noqa: S311 - a case is found again by its seed
# In a session of its own, and with no end by itself.
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]

# Eight of these have more memory than a server may have, and each has less; the buffers of sockets are the kernel's.
FILLERS = {
    "memory": "import time; block = bytearray(2**27); block[::4096] = b'x' * 2**15; time.sleep(600)",
    "sockets": """
import socket, time
held = []
while len(held) < 400:
    held.append(socket.socketpair())
    for one in held[-1]:
        one.setblocking(False)
        try:
            while True:
                one.send(bytes(2**16))
        except BlockingIOError:
            pass
time.sleep(600)
""",
}


def is_bounded() -> bool:
    """Whether its file systems refuse 100,000 empty files."""
    for folder in ("/tmp", "/dev/shm"):
        try:
            for number in range(100_000):
                Path(folder, str(number)).touch()
        except OSError:
            continue
        return False
    return True


def write(text: str) -> None:
    """Write a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write_anything(number: int) -> None:
    """Write a line of random values, in the form of an answer or in none."""
    values = ['"\\ud83d"', "NaN", "1e400", "null", "[" * 900 + "]" * 900, "{}", '"x"', "1" * 5000, "true"]
    a, b, c = (RANDOM.choice(values) for _ in range(3))
    number_or_value = RANDOM.choice([str(number), a])
    content = RANDOM.choice(
        [f'{{"content": [{{"type": "text", "text": {b}}}], "isError": {c}}}', f'{{"content": {b}}}', b]
    )
    part = RANDOM.choice(
        [f'"result": {content}', f'"error": {{"code": {b}, "message": {c}}}', f'"method": {b}, "params": {c}']
    )
    line = f'{{"jsonrpc": "2.0", "id": {number_or_value}, {part}}}'
    sys.stdout.buffer.write(RANDOM.choice([line.encode(), RANDOM.randbytes(50), line[:20].encode()]) + b"\n")
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
    if KIND == "random":
        for _ in range(3):
            write_anything(message["id"])
        return
    if KIND in FILLERS:
        for _ in range(8):
            subprocess.Popen([sys.executable, "-c", FILLERS[KIND]], start_new_session=True)
        time.sleep(600)
    text = str(is_bounded()) if KIND == "files" else "3"
    if KIND == "forks":
        subprocess.Popen(SLEEPER, start_new_session=True)
    answer(message, {"content": "three" if KIND == "wrong_result" else [{"type": "text", "text": text}]})


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
