"""The modules beside a Python file that it imports: their names come from its syntax, and none of the code is run.

A reward function's file takes them along: into its sandbox, its version and its submission. Names of the standard
library stay with that library. A folder without `__init__.py` counts unless a package of its name is installed.
"""

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from gspo.common.errors import InputError

MAX_MODULES, MAX_MODULE_BYTES = 32, 2**20
_FIX = "Correct that file, or leave out its import"


def modules_beside(
    file: Path, text: str, where: str, is_elsewhere: Callable[[str], bool] = lambda _name: False
) -> dict[str, str]:
    """The text of each module beside a file that the file or one of these modules imports, by its path from there.

    Args:
        text: Text of the file; one that cannot be parsed has no imports.
        where: The key or file that an error names.
        is_elsewhere: Whether a module of this name comes from another place.

    Raises:
        InputError: One cannot be read or parsed, or there are too many, or they are too large.
    """
    texts: dict[str, str] = {}
    try:
        waiting = [*_imported(ast.parse(text), ())]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return texts  # compiling the file names the fault
    while waiting:
        for path in _files_of(file.parent, waiting.pop(), is_elsewhere):
            name = path.relative_to(file.parent).as_posix()
            if name in texts:
                continue
            texts[name] = _read(path, where)
            _check_size(texts, where)
            package = path.relative_to(file.parent).with_suffix("").parts[:-1]
            waiting += _imported(_parsed(path, texts[name], where), package)
    return dict(sorted(texts.items()))


def top_names(paths: Iterable[str]) -> set[str]:
    """The names by which an import begins that reaches modules at these paths."""
    return {path.partition("/")[0].removesuffix(".py") for path in paths}


def _imported(tree: ast.Module, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The parts of every name that may be an imported module; `package` holds the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= len(package):
            start = package[: len(package) - node.level + 1] if node.level else ()
            base = (*start, *(node.module.split(".") if node.module else ()))
            yield base
            yield from ((*base, alias.name) for alias in node.names)


def _files_of(folder: Path, name: tuple[str, ...], is_elsewhere: Callable[[str], bool]) -> Iterator[Path]:
    """The files that an import of a name runs, if they lie in the folder: packages, then the module."""
    if name[0] in sys.stdlib_module_names or is_elsewhere(name[0]):
        return
    files: list[Path] = []
    for depth, part in enumerate(name):
        module, package = folder / f"{part}.py", folder / part / "__init__.py"
        folder = folder / part
        if package.is_file():
            files.append(package)
        elif module.is_file():
            yield from (*files, module)
            return
        elif not folder.is_dir() or (depth == 0 and _is_installed(part)):
            break
    yield from files


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a module without a spec is loaded
        return True


def _read(path: Path, where: str) -> str:
    try:
        if path.stat().st_size > MAX_MODULE_BYTES:
            raise InputError(where, f"imports {path}, which has more than {MAX_MODULE_BYTES} bytes", _fix(path))
        return importlib.util.decode_source(path.read_bytes())
    except (OSError, SyntaxError, ValueError, LookupError) as error:
        raise InputError(where, f"imports {path}, which cannot be read ({error})", _FIX) from error


def _parsed(path: Path, text: str, where: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        place = f"{path}, line {error.lineno}, column {error.offset}: {error.msg}"
        raise InputError(where, f"imports {place}", _FIX) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError(where, f"imports {path}, which cannot be parsed ({error})", _FIX) from error


def _check_size(texts: dict[str, str], where: str) -> None:
    num_bytes = sum(len(text.encode()) for text in texts.values())
    if len(texts) > MAX_MODULES or num_bytes > MAX_MODULE_BYTES:
        rule = f"imports {len(texts)} modules beside it with {num_bytes} bytes, and at most {MAX_MODULES} with"
        raise InputError(where, f"{rule} {MAX_MODULE_BYTES} bytes are taken along", _fix(None))


def _fix(path: Path | None) -> str:
    which = "that file" if path else "their folder"
    return f"Name {which} under `reads` in the configuration, which shows it to the function where it lies"
