"""Removes from the images without torch what they cannot use: libraries' tests and headers, and model code for torch.

Not part of the package: the Dockerfile runs it in the layer that installs the packages. Tokenizers and chat templates,
and every format of prompts, stay.
"""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

PACKAGES = Path(sysconfig.get_paths()["purelib"])
UNUSED = (
    *("numpy/**/tests", "pandas/tests", "regex/tests", "dill/tests", "fsspec/tests", "multiprocess/tests"),
    *("pyarrow/tests", "pyarrow/include", "pyarrow/src", "pyarrow/**/*.p[xy][dxi]"),
    # Arrow's network server and object store; the copies of its library under other names.
    *("pyarrow/*arrow_flight*", "pyarrow/_flight*", "pyarrow/*arrow_s3*", "pyarrow/_s3fs*"),
    *("pyarrow/libarrow_python.so", "pyarrow/libarrow_python.so.*.*"),
    # Not those of models/auto, which the tokenizers look into.
    *("transformers/models/[!a]*/modeling_*.py", "transformers/models/*/modular_*.py"),
)


def main() -> None:
    """Remove, and say how much that was."""
    removed = 0
    for pattern in UNUSED:
        for path in list(PACKAGES.glob(pattern)):
            files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
            removed += sum(file.lstat().st_size for file in files)
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    print(f"trimmed {removed / 1e6:.0f} MB")  # noqa: T201 - the log of the build


if __name__ == "__main__":
    main()
