"""Reads a JSONL file of the log, from its beginning or from the byte where an earlier read ended.

A last line without a line feed does not count: its writer was killed, or has not finished it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

Record = TypeVar("Record")


@dataclass(frozen=True)
class Records(Generic[Record]):
    """The records of one file.

    Attributes:
        records: In the order of the file.
        end: Byte after the last whole line, where the next read begins.
        broken: Line number -> error, of the lines that hold no record; lines count from 1 at the first byte read.
    """

    records: list[Record] = field(default_factory=list)
    end: int = 0
    broken: dict[int, str] = field(default_factory=dict)


def read_records(path: Path, parse: Callable[[Mapping[str, Any]], Record], *, offset: int = 0) -> Records[Record]:
    """Read the whole lines of a file; a missing file is an empty one.

    Args:
        parse: Makes the record of a line's JSON object; what it raises makes the line a broken one.
        offset: `end` of an earlier read.
    """
    if not path.exists():
        return Records(end=offset)
    with path.open("rb") as file:
        file.seek(offset)
        whole, line_feed, _unfinished = file.read().rpartition(b"\n")
    result = Records[Record](end=offset + len(whole) + len(line_feed))
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            result.records.append(parse(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            result.broken[number] = f"{type(error).__name__}: {error}"
    return result


def read_own_records(path: Path, parse: Callable[[Mapping[str, Any]], Record], *, offset: int = 0) -> Records[Record]:
    """Read a file in which no line may be broken.

    Raises:
        ValueError: Something else than the learner wrote into the file.
    """
    result = read_records(path, parse, offset=offset)
    for number, error in result.broken.items():
        start = f" after byte {offset}" if offset else ""
        raise ValueError(f"{path}, line {number}{start}: not a line that the learner wrote ({error})")
    return result
