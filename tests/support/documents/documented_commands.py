"""The shell commands of the documents, and whether the programs that they call would take them.

Nothing is executed here: a command of ours is parsed by its own parser, and of others what the repository knows is
compared: targets, services, routes, files.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer
import yaml
from typer.main import get_command

from gspo.cli.commands import app
from gspo.common.service.options import _parser
from gspo.coordinator.page.page_access import LINK_PATH
from tests.support.repository.source_files import ROOT, place, text_of

DOCUMENTS = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(ROOT.glob("docs/*.md")),
)
# Programs whose options this repository does not know, each with the reason.
OTHERS = {
    **dict.fromkeys(
        ("export", "printf", "cat", "umask", "grep", "wait", "nano", "sh", "echo", "exit"),
        "the shell's and the system's",
    ),
    **dict.fromkeys(("openssl", "redis-server", "kubectl", "promtool"), "another project's"),
    **dict.fromkeys(("./claude", "./opencode"), "an agent that the reader installs"),
    "vllm": "vLLM's server, of another environment than these tests",
}
_PROGRAMS = ("gspo", "make", "python", "python3", "pip", "cuda/bin/pip", "docker", "curl", "cp", "sbatch", "ray")
# Subcommand of docker compose -> options that take a value, and those that do not.
_COMPOSE: dict[str, tuple[set[str], set[str]]] = {
    "up": ({"--scale"}, {"-d", "--build", "--wait"}),
    "logs": (set(), {"-f"}),
    "down": (set(), {"-v"}),
    "exec": (set(), set()),
    "run": (set(), {"--rm"}),
    "cp": (set(), set()),
    "ps": (set(), {"-a"}),
}
# Commands that cannot be parsed, each with the reason.
ALLOWED = {"gspo reward ... --run RUN": "stands for every command of the group"}
# Stand for words of a reader's own.
_ANY = re.compile(r"\.\.\.|\[.*\]")


@dataclass(frozen=True)
class Shown:
    """A command of a document.

    Attributes:
        document: File and line of the block or sentence.
        is_whole: Whether it is a block to be copied; a part of a sentence may leave arguments out.
    """

    document: str
    text: str
    is_whole: bool


class RefusedCommandError(Exception):
    """The program would not take the command."""


def blocks() -> list[tuple[str, str]]:
    """Place and text of each shell block."""
    shown = []
    for path in DOCUMENTS:
        texts = re.findall(r"^ *```(?:sh|bash|shell)\n(.*?)^ *```", text_of(path), re.MULTILINE | re.DOTALL)
        shown += [(place(path, text), text) for text in texts]
    return shown


def shown_commands() -> list[Shown]:
    """Every simple command of the blocks, and every one of our programs in a sentence."""
    shown = [Shown(name, command, is_whole=True) for name, text in blocks() for command in _simple_commands(text)]
    for path in DOCUMENTS:
        prose = re.sub(r"^ *```.*?^ *```", "", text_of(path), flags=re.MULTILINE | re.DOTALL)
        quoted = re.findall(r"`([^`\n]+)`", prose)
        shown += [Shown(place(path, f"`{text}`"), text, is_whole=False) for text in quoted if _is_command(text)]
    return list(dict.fromkeys(shown))


def _is_command(text: str) -> bool:
    return " " in text and text.split()[0] in _PROGRAMS


def _simple_commands(text: str) -> Iterator[str]:
    """The commands of a block between the shell's operators; a loop's words are left out."""
    text = re.sub(r"<<-? ?'?(\w+)'?(.*?)^\s*\1$", "", text, flags=re.MULTILINE | re.DOTALL)  # a text for a program
    # Without the values of arrays, whose brackets are no subshell.
    for line in re.sub(r"\w+=\([^)]*\)", "", text.replace("\\\n", " ")).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();|&<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not word or not set(word) <= set("();|&"):
                words.append(word)
                continue
            if words and words[0] not in ("for", "done") and words != ["do"]:
                yield shlex.join(words)
            words = []


def check(shown: Shown) -> None:
    """See that the program takes the command.

    Raises:
        RefusedCommandError: It would not, or nothing here knows the program.
    """
    if shown.text in ALLOWED:
        return
    words = [word for word in shlex.split(shown.text) if not _ANY.fullmatch(word)]
    words = _without_redirections(words)
    while words and re.fullmatch(r"[A-Za-z_]+=.*", words[0]):
        words = words[1:]
    if not words:
        return
    program, arguments = words[0], words[1:]
    checker = {
        "gspo": _check_gspo, "make": _check_make, "python": _check_python, "python3": _check_python,
        "pip": _check_pip, "cuda/bin/pip": _check_pip, "docker": _check_docker, "curl": _check_curl,
        "cp": _check_files, "sbatch": _check_sbatch, "ray": _check_ray,
    }.get(program)  # fmt: skip
    if checker:
        checker(arguments, is_whole=shown.is_whole)
    elif program not in OTHERS:
        raise RefusedCommandError(f"{program}: nothing here knows this program; add a check, or a reason to OTHERS")


def _without_redirections(words: list[str]) -> list[str]:
    kept: list[str] = []
    for word in words:
        if kept and set(kept[-1]) <= set("<>"):
            kept.pop()
        else:
            kept.append(word)
    return kept


def _require(condition: object, problem: str) -> None:
    if not condition:
        raise RefusedCommandError(problem)


def _command_of(app: typer.Typer) -> Any:
    """The app's command; Typer types it as if it had no subcommands."""
    return get_command(app)


def _check_gspo(arguments: Sequence[str], *, is_whole: bool) -> None:
    check_click(_command_of(app), "gspo", arguments, is_whole=is_whole)


def check_click(command: Any, name: str, arguments: Sequence[str], *, is_whole: bool) -> None:
    """Parse with a command line's own parser, down to its last subcommand, and run nothing."""
    context = command.make_context(name, list(arguments), resilient_parsing=True)
    words = [*context._protected_args, *context.args] if hasattr(command, "commands") else []
    if words:
        _require(words[0] in command.commands, f"{name} has no command {words[0]}")
        check_click(command.commands[words[0]], f"{name} {words[0]}", words[1:], is_whole=is_whole)
        return
    # With the parser itself: resilient parsing overlooks errors.
    parser = command.make_parser(typer.Context(command, info_name=name))
    try:
        values, rest, _ = parser.parse_args(list(arguments))
    except Exception as error:
        raise RefusedCommandError(f"{name}: {error}") from error
    _require(not rest or hasattr(command, "commands"), f"{name} takes no argument {rest}")
    if is_whole and not hasattr(command, "commands"):
        missing = [p.name for p in command.params if p.required and values.get(p.name) in (None, ())]
        _require(not missing, f"{name} needs {', '.join(map(str, missing))}")


def _check_make(arguments: Sequence[str], *, is_whole: bool) -> None:
    for word in arguments:
        variable, is_set, _ = word.partition("=")
        if is_set:
            _require(f"$({variable})" in text_of("Makefile"), f"the Makefile does not use {variable}")
            if variable == "NAMES":
                _check_benchmarks(word.partition("=")[2].split())
        else:
            _require(
                re.search(rf"^{re.escape(word)}:", text_of("Makefile"), re.MULTILINE), f"make has no target {word}"
            )


def _check_benchmarks(arguments: Sequence[str]) -> None:
    from benchmarks.__main__ import SECTIONS
    from benchmarks.__main__ import app as benchmarks

    check_click(_command_of(benchmarks), "python -m benchmarks", arguments, is_whole=False)
    known = {section.name for section in SECTIONS} | set(_command_of(benchmarks).commands)
    if arguments and not arguments[0].startswith("-"):
        _require(arguments[0] in known, f"{arguments[0]} is neither a section nor a command of benchmarks")


def _check_python(arguments: Sequence[str], *, is_whole: bool) -> None:
    if arguments[0] == "-c":
        compile(arguments[1], "-c", "exec")
    elif arguments[0] != "-m":
        _check_source(ROOT / arguments[0], arguments[1:])
    elif arguments[1] == "benchmarks":
        _check_benchmarks(arguments[2:])
    elif arguments[1] == "examples.experiments":
        from examples.experiments.__main__ import app as experiments

        check_click(_command_of(experiments), "python -m examples.experiments", arguments[2:], is_whole=is_whole)
    elif arguments[1].startswith("gspo."):
        _check_service(arguments[1], arguments[2:])
    elif (ROOT / arguments[1].replace(".", "/")).is_dir():
        _check_source(ROOT / arguments[1].replace(".", "/") / "__main__.py", arguments[2:])
    else:
        _require(arguments[1] in ("venv", "gspo"), f"python -m {arguments[1]}: there is no such module")


def _check_source(path: Path, arguments: Sequence[str]) -> None:
    """A script, whose options stand in its source: by name in argparse, as parameters with Typer."""
    _require(path.is_file(), f"{path} does not exist")
    source = path.read_text()
    for word in arguments:
        if word.startswith("--"):
            name = word[2:].partition("=")[0]
            typed = re.search(rf"^\s+{name.replace('-', '_')}: Annotated\[", source, re.MULTILINE)
            _require(typed or f'"--{name}"' in source, f"{path.name} has no option {word}")


def _check_service(module: str, arguments: Sequence[str]) -> None:
    service = module.removeprefix("gspo.")
    main = ROOT / "services/gspo" / service / "__main__.py"
    _require(main.is_file(), f"{module} cannot be started")
    if "parse_options(" not in main.read_text():
        _check_source(main, arguments)
        return
    parser = _parser(service, "")
    try:
        parser.exit_on_error = False
        _, rest = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise RefusedCommandError(f"{module}: {error}") from error
    _require(not rest, f"{module} takes no argument {rest}")


def _check_ray(arguments: Sequence[str], *, is_whole: bool) -> None:
    """A command of Ray's, and behind `--` one of ours."""
    if "--" in arguments:
        program, command, *rest = arguments[arguments.index("--") + 1 :]
        _require(program == "gspo", f"ray starts {program}, not gspo")
        check_click(_command_of(app).commands[command], f"gspo {command}", rest, is_whole=False)


def _check_pip(arguments: Sequence[str], *, is_whole: bool) -> None:
    extras = set(re.findall(r"^(\w[\w-]*) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for word in arguments:
        if shown := re.search(r"^(?:\.|gspo)\[([\w,-]+)\]$", word):
            _require(set(shown[1].split(",")) <= extras, f"{word} names an extra that pyproject.toml has not")


@cache
def _compose_file() -> dict[str, Any]:
    return dict(yaml.safe_load(text_of("docker-compose.yml")))


def _check_docker(arguments: Sequence[str], *, is_whole: bool) -> None:
    if arguments[:1] == ["build"]:
        target = arguments[arguments.index("--target") + 1]
        _require(f" AS {target}\n" in text_of("deploy/docker/Dockerfile"), f"the Dockerfile has no target {target}")
        return
    _require(arguments and arguments[0] == "compose", "docker is called with compose and build alone")
    compose = _compose_file()
    words = list(arguments[1:])
    while words and words[0] in ("-f", "--profile"):
        option, value = words[0], words[1]
        profiles = {profile for service in compose["services"].values() for profile in service.get("profiles", ())}
        _require((ROOT / value).is_file() if option == "-f" else value in profiles, f"docker compose {option} {value}")
        words = words[2:]
    _require(words and words[0] in _COMPOSE, f"docker compose {words[:1]}: add it to _COMPOSE if it exists")
    (valued, plain), rest = _COMPOSE[words[0]], words[1:]
    while rest and rest[0].startswith("-"):
        _require(rest[0] in valued | plain, f"docker compose {words[0]} has no option {rest[0]}")
        taken = rest[0] in valued
        if taken:
            _require(rest[1].partition("=")[0] in compose["services"], f"{rest[1]} is no service")
        rest = rest[2:] if taken else rest[1:]
    if words[0] in ("logs", "exec", "run", "cp") and rest:
        service = rest[0].partition(":")[0]
        _require(service in compose["services"], f"docker-compose.yml has no service {service}")
        if words[0] == "run" and service == "gspo":
            _check_gspo(rest[1:], is_whole=is_whole)


@cache
def _routes() -> list[tuple[str, re.Pattern[str]]]:
    """Method and path of each route of the services."""
    routes = [("get", re.compile(path)) for path in ("/readyz", "/healthz", "/metrics/?")]
    routes.append(("post", re.compile(LINK_PATH)))
    for path in (ROOT / "services/gspo").rglob("*.py"):
        source = text_of(path)
        prefix = (re.findall(r'APIRouter\(prefix="([^"]+)"', source) or [""])[0]
        declared = re.findall(r'(?:@\w+|\bapp)\.(get|post|put|delete)\(\s*"([^"]*)"', source)
        added = re.findall(r'\badd\("([A-Z]+)", "([^"]*)"', source) if prefix else []
        for method, route in [*declared, *((method.lower(), route) for method, route in added)]:
            pattern = re.sub(r"\\{[^}]*\\}", "[^/]+", re.escape(prefix + route))
            routes.append((method, re.compile(pattern)))
    return routes


def _check_curl(arguments: Sequence[str], *, is_whole: bool) -> None:
    (url,) = [word for word in arguments if word.startswith(("http://", "https://"))]
    path = "/" + url.split("://", 1)[1].partition("/")[2].partition("?")[0]
    method = "post" if {"-d", "-F", "--json"} & {*arguments} else "get"
    _require(
        any(method == of_route and pattern.fullmatch(path) for of_route, pattern in _routes()),
        f"no service answers {method.upper()} {path}",
    )


def _check_files(arguments: Sequence[str], *, is_whole: bool) -> None:
    for word in arguments:
        if word.partition("/")[0] in ("examples", "deploy", "docs", "tests"):
            _require((ROOT / word).exists(), f"{word} does not exist")


def _check_sbatch(arguments: Sequence[str], *, is_whole: bool) -> None:
    _require((ROOT / "deploy/ray" / Path(arguments[0]).name).is_file(), f"{arguments[0]} does not exist")
    check_click(_command_of(app).commands["run"], "gspo run", arguments[1:], is_whole=False)
