"""The commands of the documents: each is one that its program takes, and the cheap ones run.

`make test-long` executes docs/start.md whole.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from gspo.cli.commands import app
from tests.support.documents.documented_commands import (
    ALLOWED,
    OTHERS,
    RefusedCommandError,
    Shown,
    blocks,
    check,
    shown_commands,
)
from tests.support.repository.source_files import fail_with
from tests.support.tiny_model import make_tiny_model

SHOWN = shown_commands()
_COMMAND_S = 120


def test_every_program_of_the_documents_is_found() -> None:
    programs = {shown.text.split()[0] for shown in SHOWN}
    assert {"gspo", "make", "docker", "curl", "python", "sbatch", "ray"} <= programs
    assert programs >= {name for name, reason in OTHERS.items() if reason != "the shell's and the system's"}
    assert {shown.text for shown in SHOWN} >= set(ALLOWED)
    assert len(SHOWN) > 150


def test_each_command_is_one_that_its_program_takes() -> None:
    fail_with(problem for shown in SHOWN for problem in problems(shown))


def problems(shown: Shown) -> Iterator[str]:
    """Yield why its program would not take a command of a document."""
    try:
        check(shown)
    except RefusedCommandError as error:
        yield f"{shown.document}: `{shown.text}`: {error}"


def test_each_block_is_of_the_shell_s_syntax() -> None:
    fail_with(problem for document, text in blocks() for problem in syntax_errors(document, text))


def syntax_errors(document: str, text: str) -> Iterator[str]:
    """Yield what bash says of a block that is not of its syntax."""
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    if done.returncode or done.stderr:
        yield f"{document}: {done.stderr.strip()} in\n{text}"


def test_a_block_with_an_open_bracket_is_refused() -> None:
    assert len([*syntax_errors("any.md", "(cd docs")]) == 1


@pytest.mark.parametrize(
    "text",
    [
        "gspo run my-run --resum",
        "gspo stats my-run",
        "gspo reward activat exact 9f86d081",
        "gspo view",
        "gspo report a b",
        "make tset",
        'make bench NAMSE="engine"',
        'make bench NAMES="engin"',
        "python -m benchmarks engine --quik",
        "python -m gspo.learner --run-directory x",
        "python examples/arithmetic/cold_start.py --teachers x",
        "docker compose up --bild",
        "docker compose logs -f lerner",
        "docker compose --profile gatway up",
        "docker compose run --rm gspo reprt /runs/current",
        "curl http://127.0.0.1:8081/v1/reward",
        "curl -d {} http://127.0.0.1:8081/v1/state",
        "sbatch deploy/ray/gspo.sbatch config.yaml --resum",
        "ray job submit --address http://h:8265 -- gspo run c.yaml --clutser ray",
        "pip install '.[cud]'",
        "cp examples/arithmetic/distil.yaml x",
        "gsop run my-run",
    ],
)
def test_a_misspelt_command_is_refused(text: str) -> None:
    with pytest.raises(RefusedCommandError):
        check(Shown("any.md", text, is_whole=True))


def leaves(command: object, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The words of each command of the command line, and of each group."""
    subcommands = getattr(command, "commands", {})
    return [words, *(leaf for name, sub in subcommands.items() for leaf in leaves(sub, (*words, name)))]


def test_each_command_explains_itself() -> None:
    fail_with(
        f"gspo {' '.join(words)} --help: exit code {result.exit_code}\n{result.output}"
        for words in leaves(get_command(app))
        if (result := CliRunner().invoke(app, [*words, "--help"])).exit_code or "Usage" not in result.output
    )


def test_the_first_commands_of_a_reader_run(tmp_path: Path) -> None:
    """`gspo init`, `config`, `plan` and `status` in an empty folder, as a reader runs them."""
    model = make_tiny_model(tmp_path / "path" / "to" / "model")

    def gspo(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gspo.cli", *words]
        return subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=False, timeout=_COMMAND_S)

    example = gspo("init", "my-run", "--model", str(model))
    assert example.returncode == 0, example.stderr
    files = {path.name for path in (tmp_path / "my-run").iterdir()}
    assert files == {"config.yaml", "reward.py", "prompts.jsonl", "eval.jsonl", "model"}
    assert "learner.token_records" in gspo("config", "learner.token_records").stdout
    plan = gspo("plan", str(model), "--gpus", "8", "--gpu-memory", "80", "--context", "512")
    assert plan.returncode == 0, plan.stderr
    assert gspo("status", "my-run").returncode == 2, "it has not run"
