"""The types of a call: the code that a sandbox loads, a question, its answer, and the ways in which a call fails.

A question is one of

- `{"arguments": {...}}`: one call of a reward function for a whole batch; `supplied` names the arguments that its
  process makes (inside/supplied.py)
- `{"rows": [{...}, ...]}`: one call for each row
- `{"function": NAME, "arguments": {...}}`: one call of a function of an environment, which may return any JSON value
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, get_args

import msgspec

from gspo.reward.sandbox.inside.recognise import MAX_NAME_CHARS, MAX_PARAMETERS

CodeKind = Literal["reward", "environment"]
# Arguments of a TRL function that its process makes with the model's tokenizer.
OF_TOKENIZER = frozenset({"tokenizer", "raw_completions"})
Question = dict[str, Any]
FailureKind = Literal[
    "timeout",  # it took longer than its wall clock or processor time
    "memory",  # it asked for more memory than its limit
    "crash",  # its process ended, by a signal or os._exit
    "forbidden",  # it tried something that the sandbox does not allow, or wrote into the channel of results
    "output_too_large",  # it printed, returned or wrote to its scratch more than the limit
    "invalid_return",  # it returned a value of another form
    "exception",  # it raised
]
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
FAILURE_KINDS: frozenset[str] = frozenset(get_args(FailureKind))


@dataclass(frozen=True)
class CallLimits:
    """The limits of one call of a function.

    Attributes:
        timeout_s: Wall clock of a call.
        memory_mb: Address space of the process, MiB.
        cpu_s: Processor time of a call, over all its threads; None leaves it to timeout_s.
    """

    timeout_s: float = 10.0
    memory_mb: int = 2048
    cpu_s: float | None = None


@dataclass(frozen=True)
class Code:
    """One version of a user's code.

    Attributes:
        name: Name in logs and metrics.
        text: Source text.
        version: SHA-256 of the text's bytes.
        filename: Shown in tracebacks; `__file__` of the module.
        entry: The function, or for an environment the object that has reset and step; None: recognised by its form.
        reads: Files and folders beside its own text that it may read and import from.
        modules: The modules beside its file that it takes along: their texts, by their paths from there.
    """

    name: str
    text: str
    version: str
    filename: str
    entry: str | None = None
    kind: CodeKind = "reward"
    reads: tuple[Path, ...] = field(default=())
    modules: Mapping[str, str] = field(default_factory=dict, hash=False)


class Signature(msgspec.Struct, frozen=True):
    """The parameters of a loaded function, as inside/recognise.py describes it.

    Attributes:
        takes: Names of all parameters.
        required: Names of those without a default.
        takes_any: Whether it has `**columns` or the like.
    """

    entry: _Name
    convention: Literal["trl", "verl", "verl_batch", "openrlhf", "environment"]
    takes: Annotated[frozenset[_Name], msgspec.Meta(max_length=MAX_PARAMETERS)]
    required: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=MAX_PARAMETERS)]
    takes_any: bool

    def __post_init__(self) -> None:
        if not all(name.isidentifier() for name in (*self.takes, *self.required)):
            raise ValueError("a parameter's name is not an identifier")
        if self.entry and not self.entry.isidentifier():
            raise ValueError("the function's name is not an identifier")


@dataclass(frozen=True)
class Answer:
    """The result of a call.

    Attributes:
        values: For `arguments` and `rows` a list, each item as inside/results.py encodes it; for `function`
            the JSON value.
        output: The end of its printed output.
        logged_json: The metrics and columns that the function logged; empty where it logged none.
    """

    values: Any
    output: str = ""
    logged_json: str = ""


class CallError(Exception):
    """A call failed. Its text is one line for people.

    Attributes:
        kind: How it failed.
        error_type: Class of the exception in the user's code, else "".
        traceback: The end of its traceback, else "".
        output: The end of its printed output.
        loading: Whether the code failed before it could be called.
        line: Line of the user's file, if it is known.
    """

    def __init__(
        self,
        kind: FailureKind,
        text: str,
        *,
        error_type: str = "",
        traceback: str = "",
        output: str = "",
        loading: bool = False,
        line: int | None = None,
    ) -> None:
        super().__init__(text)
        self.kind, self.error_type, self.traceback, self.output = kind, error_type, traceback, output
        self.loading, self.line = loading, line

    @property
    def is_harmless(self) -> bool:
        """Whether the worker is as good as before: after other failures it may be full, short of something, or gone."""
        return self.kind in ("exception", "invalid_return") and bool(self.error_type)


class Callee(Protocol):
    """A sandbox, an HTTP server or another process that answers questions."""

    @property
    def signature(self) -> Signature:
        """The parameters of the function; known after `load`."""

    async def load(self) -> Signature:
        """Start it.

        Raises:
            CallError: It cannot start.
        """

    async def call(self, question: Question, *, session: str | None = "") -> Answer:
        """Answer one question.

        Raises:
            CallError: It failed.
        """

    async def close(self) -> None:
        """End its processes and connections."""
