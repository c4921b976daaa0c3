"""The functions of a run in its log: sources are written once, calls of several processes add up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from gspo.runlog.function_files import (
    FunctionCalls,
    FunctionSource,
    read_calls,
    read_source,
    read_sources,
    write_calls,
    write_source,
)

SOURCE = FunctionSource(
    name="exact",
    version="ab" * 32,
    kind="reward",
    filename="exact.py",
    entry="",
    source="def reward(completions): ...\n",
    args={"strip": True},
    is_tryable=True,
    reads=[],
    used_unix_s=5.0,
)


def test_a_source_is_written_once(tmp_path: Path) -> None:
    write_source(tmp_path, SOURCE)
    write_source(tmp_path, replace(SOURCE, source="another"))
    earlier = replace(SOURCE, version="cd" * 32, used_unix_s=4.0)
    write_source(tmp_path, earlier)
    assert read_source(tmp_path, SOURCE.version) == SOURCE
    assert read_sources(tmp_path) == [earlier, SOURCE]
    assert not list(tmp_path.rglob("*.tmp"))


def test_calls_of_two_processes_add_up(tmp_path: Path) -> None:
    first = FunctionCalls("exact", "ab", 2, 8, 0.5, {"timeout": 1}, "out", {"unix_s": 9.0, "kind": "timeout"})
    second = FunctionCalls("exact", "ab", 3, 3, 0.25, {"timeout": 1, "crash": 2}, "", {"unix_s": 4.0, "kind": "crash"})
    write_calls(tmp_path, "p1", [FunctionCalls("exact", "ab")])
    write_calls(tmp_path, "p1", [first])
    write_calls(tmp_path, "p2", [second, FunctionCalls("other", "cd", 1)])
    calls = read_calls(tmp_path)
    assert calls["exact", "ab"] == FunctionCalls(
        "exact", "ab", 5, 11, 0.75, {"timeout": 2, "crash": 2}, "out", {"unix_s": 9.0, "kind": "timeout"}
    )
    assert calls["other", "cd"].calls == 1


def test_what_is_not_there_or_foreign_is_left_out(tmp_path: Path) -> None:
    assert read_source(tmp_path, "ab" * 32) is None
    assert read_sources(tmp_path) == []
    assert read_calls(tmp_path) == {}
    folder = tmp_path / "functions"
    folder.mkdir()
    (folder / f"source-{'cd' * 32}.json").write_text("[1]")
    (folder / f"source-{'ef' * 32}.json").write_text(json.dumps({"name": "x"}))
    (folder / "calls-p.json").write_text('[{"name": "x"}, 3]')
    (folder / "calls-q.json").write_text("{")
    (tmp_path / "secret.json").write_text('{"name": "secret"}')
    assert read_sources(tmp_path) == []
    assert read_calls(tmp_path) == {}
    assert read_source(tmp_path, "../../secret") is None
