"""A trial of a model's tokenizer.json in a process of its own, with little time and memory; then of its chat template.

Services encode texts in their own processes. A normalizer may multiply each character, a post-processor the whole text,
and a pattern may search for hours. The library ends its process when memory ends.
"""

import resource
import subprocess
import sys
from functools import cache
from pathlib import Path

from gspo.common.errors import InputError
from gspo.common.host.module_command import module_command
from gspo.common.model.template_trial import check_chat_template

# Of the processor; and of memory: a vocabulary of a million tokens takes less than 1 GiB.
_MOST_SECONDS, _MOST_BYTES = 20, 2 << 30
_TEXT = 'Add 1 + 22 to  x.\n"Grüße", 你好 🙂 ' + "a" * 64 + "1" * 64 + " " * 64 + "a!" * 32
# One for each byte, and some hundred that a post-processor adds.
_MOST_TOKENS = 4096
_UNREADABLE, _TOO_LONG, _FAILED = 3, 4, 5
_FIX = "Take the model from a source that you trust, or correct its tokenizer.json"


@cache
def check_tokenizer_files(folder: Path) -> None:
    """Encode a short text by the tokenizer.json of a model folder, if there is one, and try its chat template.

    Raises:
        InputError: One of them takes too much time or memory, or gives too much. A file that cannot be read passes:
            its reader refuses it.
    """
    _check_tokenizer(folder / "tokenizer.json")
    check_chat_template(folder)


def _check_tokenizer(path: Path) -> None:
    if not path.is_file():
        return
    try:
        done = subprocess.run([*module_command(__name__), path], capture_output=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        raise _refusal(path, "did not end within 120 s") from None
    if done.returncode == _TOO_LONG:
        raise _refusal(path, f"gives more than {_MOST_TOKENS:,} tokens")
    if done.returncode == _FAILED:
        raise _refusal(path, f"fails ({done.stdout.decode(errors='replace').strip()})")
    if done.returncode < 0:  # SIGXCPU, or SIGABRT where the library gets no memory
        raise _refusal(path, f"takes more than {_MOST_SECONDS} s of a processor, or {_MOST_BYTES >> 30} GiB,")
    if done.returncode not in (0, _UNREADABLE):
        raise RuntimeError(f"the trial of a tokenizer failed: {done.stderr.decode(errors='replace')[-1000:]}")


def _refusal(path: Path, what: str) -> InputError:
    return InputError("model.path", f"the tokenizer of {path} {what} for a text of {len(_TEXT)} characters", _FIX)


def _encode(path: str) -> int:
    """In the trial's process: the exit code."""
    from tokenizers import Tokenizer

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception:  # noqa: BLE001 - the library's own kind for every fault of a file
        return _UNREADABLE
    try:
        return _TOO_LONG if len(tokenizer.encode(_TEXT).ids) > _MOST_TOKENS else 0
    except BaseException as error:  # noqa: BLE001 - a panic of the library, as for a pattern that searches too long
        print(str(error)[:200])  # noqa: T201
        return _FAILED


if __name__ == "__main__":
    sys.exit(_encode(sys.argv[1]))
