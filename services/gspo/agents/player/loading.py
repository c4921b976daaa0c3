"""Finds the function of an agent in a Python file."""

import importlib.util
import inspect
from pathlib import Path

from .task import Agent


class UnfitAgentError(Exception):
    """There is no agent that could play; the message completes the file's or the program's name.

    Attributes:
        fix: The change that helps.
    """

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(rule)
        self.fix = fix


def load_agent(path: Path, entry: str) -> Agent:
    """The function `entry` of a file, which is run as a module.

    Raises:
        UnfitAgentError: The file cannot be imported, or has no such function.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise UnfitAgentError("is no Python file", "Name a file with `async def play(task)`")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        rule = f"cannot be imported ({type(error).__name__}: {error})"
        raise UnfitAgentError(rule, "Mend it") from error
    agent: Agent | None = getattr(module, entry, None)
    if agent is None or not inspect.iscoroutinefunction(agent):
        raise UnfitAgentError(f"has no `async def {entry}(task)`", "Write one, or name another function as the entry")
    return agent
