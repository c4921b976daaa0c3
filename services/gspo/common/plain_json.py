"""JSON that strangers write: its bound, and its values without halves of characters and numbers beyond JSON."""

import json
from pathlib import Path
from typing import Any

# Each member of a list or object is read in the event loop. The bound is on bytes that are counted before anything is
# parsed, so commas and brackets in texts count too.
MAX_JSON_MEMBERS = 100_000
TOO_MANY_MEMBERS = f"more than {MAX_JSON_MEMBERS} commas and opening brackets"


def has_many_members(text: bytes | bytearray) -> bool:
    """Whether a JSON text may hold more than MAX_JSON_MEMBERS lists, objects and members of them."""
    return sum(map(text.count, (b",", b"[", b"{"))) > MAX_JSON_MEMBERS


def whole_text(value: Any) -> Any:
    """A value of JSON's kinds with `?` for halves of surrogate pairs: neither UTF-8 nor the contract carries them.

    Raises:
        RecursionError: It is too deep.
    """
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def plain_json(text: str) -> Any:
    """The value of a JSON text, of finite numbers and whole text alone.

    Raises:
        ValueError, RecursionError: It is none, too deep, or has more than MAX_JSON_MEMBERS.
    """
    if has_many_members(text.encode(errors="replace")):
        raise ValueError(f"it has {TOO_MANY_MEMBERS}")
    return json.loads(json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False).encode(errors="replace"))


def read_json_file(path: Path) -> Any:
    """The value of a file of a user or of a model.

    Raises:
        OSError: It cannot be read.
        ValueError: It is invalid, or nested too deeply.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
