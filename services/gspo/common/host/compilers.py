"""The compilers that torch.compile calls."""

import os
import shutil

_NAMES = {"CC": ("gcc", "clang", "cc"), "CXX": ("g++", "clang++", "c++")}


def compiler_path(variable: str) -> str | None:
    """The path of the compiler in a variable, CC or CXX, or of a usual one; None if there is none."""
    chosen = os.environ.get(variable)
    paths = (shutil.which(name) for name in ((chosen,) if chosen else _NAMES[variable]))
    return next((path for path in paths if path), None)


def missing_compiler(*, on_gpu: bool) -> str:
    """The compiler that torch.compile lacks; empty if there is one."""
    variable = "CC" if on_gpu else "CXX"
    return "" if compiler_path(variable) else f"a compiler ({variable}, {', '.join(_NAMES[variable])})"
