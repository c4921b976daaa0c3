"""A trial of a model's chat template in a process of its own, with little time and memory.

Services render the template in their own processes. Jinja's sandbox keeps a template from files and code, but not from
loops without end or texts without end. A template that waits for a certain conversation is not found here.
"""

import json
import re
import resource
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from gspo.common.errors import InputError
from gspo.common.host.module_command import module_command
from gspo.common.plain_json import read_json_file

# Of the processor; and of memory, for Python and jinja2.
_MOST_SECONDS, _MOST_BYTES = 5, 1 << 30
# A short conversation has some hundred characters, and a template adds a system prompt and tools to it.
_MOST_CHARACTERS = 1 << 20
# By name: published models have up to four.
_MOST_TEMPLATES = 20
_FIX = "Take the model from a source that you trust, or correct chat_template in its tokenizer files"
_TOO_LONG, _TOO_MUCH = 3, 4
_NUMBERED = {"type": "object", "properties": {"number": {"type": "integer", "description": "A number"}}}
_TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds", "parameters": _NUMBERED}}]
_CALL = {"type": "function", "function": {"name": "add", "arguments": {"number": 1}}}
_CHAT = [
    {"role": "user", "content": "Add 1."},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "add", "content": "2"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Thanks."},
]
_CASES: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "Be short."}, *_CHAT[:1]]},
    {"messages": [*_CHAT[:1], *_CHAT[3:]], "tools": None},
    {"messages": _CHAT, "tools": _TOOLS},
]


@cache
def check_chat_template(folder: Path) -> None:
    """Render a few short conversations by the template of a model folder, if it has one.

    Raises:
        InputError: They take too much time or memory, the text is endless, or there are too many templates. A
            conversation that the template refuses passes.
    """
    templates = _templates(folder)
    if len(templates) > _MOST_TEMPLATES or sum(map(len, templates)) > _MOST_CHARACTERS:
        rule = (
            f"{folder} has more than {_MOST_TEMPLATES} chat templates, or of {_MOST_CHARACTERS:,} characters together"
        )
        raise InputError("model.path", rule, _FIX)
    for template in templates:
        command = module_command(__name__)
        try:
            done = subprocess.run(command, input=template.encode(), capture_output=True, timeout=60, check=False)
        except subprocess.TimeoutExpired:
            raise _endless(folder, "did not end within 60 s") from None
        if done.returncode == _TOO_LONG:
            raise _endless(folder, f"gives more than {_MOST_CHARACTERS:,} characters")
        if done.returncode == _TOO_MUCH or done.returncode < 0:  # SIGXCPU, or a crash without memory
            raise _endless(folder, f"takes more than {_MOST_SECONDS} s of a processor, or {_MOST_BYTES >> 30} GiB")
        if done.returncode:
            raise RuntimeError(f"the trial of a chat template failed: {done.stderr.decode(errors='replace')[-1000:]}")


def _endless(folder: Path, what: str) -> InputError:
    return InputError(
        "model.path",
        f"the chat template of {folder} {what} for a conversation of a few words",
        _FIX,
    )


def _templates(folder: Path) -> list[str]:
    """The texts of the folder's templates: one, or several by name; in any of the files that transformers reads."""
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.jinja"))]
    for name in ("tokenizer_config.json", "chat_template.json"):
        try:
            content = read_json_file(folder / name)
        except (OSError, ValueError):  # the reader of the file refuses it
            continue
        stored = content.get("chat_template") if isinstance(content, dict) else None
        named = stored if isinstance(stored, list) else [{"template": stored}]
        texts += [it["template"] for it in named if isinstance(it, dict) and isinstance(it.get("template"), str)]
    return texts


def _render(template: str) -> int:
    """In the trial's process: the exit code."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: str(form)}
    # Only transformers knows the tag, around the text of an assistant.
    template = re.sub(r"({%-?\s*)generation(\s*-?%})", r"\1if true\2", template).replace("endgeneration", "endif")
    for case in _CASES:
        num_characters = 0
        try:
            tokens = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
            for piece in environment.from_string(template).generate(**tokens, **case):
                num_characters += len(piece)
                if num_characters > _MOST_CHARACTERS:
                    return _TOO_LONG
        except MemoryError:
            return _TOO_MUCH
        except Exception:  # noqa: BLE001, S112 - a refusal or a fault of the template, which is not looked for here
            continue
    return 0


if __name__ == "__main__":
    sys.exit(_render(sys.stdin.buffer.read().decode()))
