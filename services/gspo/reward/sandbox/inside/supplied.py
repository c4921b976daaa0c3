"""Arguments that a worker makes for a function that names them: TRL's log_metric, log_extra and trainer_state, and the
tokenizer with the texts that it decodes. The service asks for them by name.
"""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .results import InvalidReturnError, plain_value, type_name

# A longer text in log_extra is cut, with a note at its end.
MAX_TEXT_CHARS = 4000


class TrainerState:
    """TRL's trainer_state, as far as a service has it.

    Attributes:
        global_step: Steps behind the newest policy that sampled the answers.
    """

    def __init__(self, global_step: int) -> None:
        self.global_step = global_step

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state has global_step alone, and not {name}")


class CallLog:
    """The metrics and columns that a function logs in one call."""

    def __init__(self) -> None:
        self._metrics: dict[str, list[float]] = {}
        self._columns: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: Any) -> None:
        """Log a number about the answers of this call; several of one name are averaged."""
        number = plain_value(value)
        if not isinstance(number, float):
            raise InvalidReturnError(f"logged {type_name(value)} as the metric '{name}', where a number belongs")
        self._metrics.setdefault(str(name), []).append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a value of each answer."""
        self._columns[str(column)] = list(values)

    def as_json(self, num_answers: int) -> str:
        """Means of the metrics, and the columns of each answer; empty if nothing was logged.

        Raises:
            InvalidReturnError: A column has another length than the answers.
        """
        if not self._metrics and not self._columns:
            return ""
        for column, values in self._columns.items():
            if len(values) != num_answers:
                text = f"logged {len(values)} values in the column '{column}' for {num_answers} completions"
                raise InvalidReturnError(text)
        columns = [{name: _plain(values[i]) for name, values in self._columns.items()} for i in range(num_answers)]
        metrics = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        return json.dumps({"metrics": metrics, "columns": columns})


def _plain(value: Any) -> Any:
    """A value that JSON carries, else its text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(number := plain_value(value), float) and number - number == 0:  # neither NaN nor infinity
        return number
    text = value if isinstance(value, str) else str(value)
    cut = len(text) - MAX_TEXT_CHARS
    return f"{text[:MAX_TEXT_CHARS]} ... ({cut} characters cut)" if cut > 0 else text


def load_tokenizer(files: dict[str, bytes]) -> Any:
    """The tokenizer of these files, by transformers."""
    from transformers import AutoTokenizer

    folder = Path(tempfile.mkdtemp())
    try:
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    finally:
        shutil.rmtree(folder)
