"""`gspo reward` as a user calls it: serve without a run, submit, look, try, activate, retire; and a run that then
finds what was submitted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gspo.common.config.loading import parse_config, write_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.reward.check import check
from tests.support.repository.command_line import gspo_here
from tests.support.service_process import make_run, wait_exit

SOURCE = """def reward(completions, answer):
    print('scored')
    return [{} * (given == right) for given, right in zip(completions, answer)]
"""
START_S = 60.0


def gspo(*words: object, url: str, code: int = 0) -> str:
    """The output of a command, or its errors if it fails."""
    done = gspo_here("reward", *words, environment={"GSPO_REWARD_URL": url, "COLUMNS": "200"})
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


def until_printed(path: Path, pattern: str) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if match := re.search(pattern, path.read_text()):
            return match[1]
        time.sleep(0.1)
    raise TimeoutError(path.read_text())


def with_functions(config: Config, functions: list[dict[str, Any]]) -> Config:
    raw_config = config.model_dump(mode="json")
    return parse_config({**raw_config, "reward": {**raw_config["reward"], "functions": functions}}, Path.cwd())


def test_a_function_is_submitted_without_a_run_and_found_by_the_next(tmp_path: Path) -> None:
    config = with_functions(make_run(tmp_path, tmp_path / "model"), [{"name": "exact"}])
    with pytest.raises(
        InputError, match=r"functions.0.name: there is no reward function 'exact' in .*gspo reward serve"
    ):
        check(config)
    file, output = tmp_path / "config.yaml", tmp_path / "said"
    write_config(config, file)
    with output.open("wb") as out:
        command = [sys.executable, "-m", "gspo.cli", "reward", "serve", str(tmp_path)]  # it stands for the file
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "COLUMNS": "200"})
    try:
        _use(tmp_path, until_printed(output, r"reward functions at (\S+),"))
    finally:
        process.send_signal(signal.SIGINT)
        assert wait_exit(process, 40) == 0, output.read_text()
    with pytest.raises(InputError, match="exact was retired, and no version of it is asked for"):
        check(config)
    check(with_functions(config, [{"name": "exact", "version": _version(tmp_path, 1)}]))


def _version(folder: Path, number: int) -> str:
    (name,) = (folder / ".rewards/names").glob("exact.json")
    return str(list(json.loads(name.read_text())["versions"])[number])[:12]


def _use(folder: Path, url: str) -> None:
    good, better, bad = (folder / name for name in ("exact.py", "better.py", "bad.py"))
    good.write_text(SOURCE.format(1.0))
    (folder / "factors.py").write_text("FACTOR = 2.0\n")
    better.write_text("from factors import FACTOR\n" + SOURCE.format("FACTOR"))
    bad.write_text("import requests\n" + SOURCE.format(1.0))
    (folder / "tests.json").write_text(json.dumps([{"input": {"completion": "4", "answer": "4"}, "expected": 1.0}]))
    (folder / "rows.jsonl").write_text('{"completion": "4", "answer": "4"}\n{"completion": "5", "answer": "4"}\n')
    assert "active: scores from now on" in gspo("submit", good, "--tests", folder / "tests.json", url=url)
    assert "known before" in gspo("submit", good, url=url)
    assert "line 1, column 1: imports 'requests'" in gspo("submit", bad, url=url, code=2)
    assert "gave 2, and 1 is expected" in gspo(
        "submit", better, "--name", "exact", "--tests", folder / "tests.json", url=url, code=2
    )
    waits = gspo("submit", better, "--name", "exact", url=url)
    version = re.search(r"exact ([0-9a-f]{64})\nnot active: gspo reward activate exact", waits)[1]  # type: ignore[index]
    listed = gspo("list", url=url)
    assert "exact_match" in listed and "submitted" in listed
    tried = gspo("try", "exact", folder / "rows.jsonl", "--version", version[:8], url=url)
    assert "it printed:\nscored" in tried and re.search(r"^ *0 +2 ", tried, re.MULTILINE)
    hostile = (
        'def reward(completions):\n    print("[/red]\\x1b[2J")\n    raise ValueError("[/b]\\x1b]0;" + completions[0])\n'
    )
    (folder / "hostile.py").write_text(hostile)
    (folder / "list.json").write_text(json.dumps([{"completion": "a\u2028b"}, {"completion": "c"}]))
    gspo("submit", folder / "hostile.py", url=url)
    tried = gspo("try", "hostile", folder / "list.json", url=url)
    assert r"[/b]\x1b]0;" in tried and r"[/red]\x1b[2J" in tried and "\x1b" not in tried
    (folder / "none.jsonl").write_text("5\n")
    assert "none.jsonl, line 1: is a number, and a row is an object" in gspo(
        "try", "hostile", folder / "none.jsonl", url=url, code=2
    )
    assert version[:12] in gspo("activate", "exact", version[:8], url=url)
    assert gspo("show", "exact", "--source", url=url) == better.read_text() + "\n# factors.py\nFACTOR = 2.0\n"
    assert version[:12] in gspo("show", "exact", url=url)
    assert "activate" in gspo("logs", "exact", url=url)
    assert "retired" in gspo("retire", "exact", url=url)
    first = hashlib.sha256(hostile.encode()).hexdigest()
    assert "is active" in gspo("remove", "hostile", first[:8], url=url, code=2)
    gspo("retire", "hostile", url=url)
    assert f"{first[:12]} removed" in gspo("remove", "hostile", first[:8], url=url)
    assert "there is no reward function 'hostile'" in gspo("show", "hostile", url=url, code=2)
    assert "there is no reward function 'exacd'. Did you mean 'exact'?" in gspo("show", "exacd", url=url, code=2)
