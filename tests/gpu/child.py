"""One part as a process: `python -m tests.gpu.child OPTIONS_JSON ANSWER_FILE`.

Neighbours: `__main__` starts it and reads the answer; the part_*.py are what it runs.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
import traceback
from pathlib import Path

from tests.gpu.case import Case

_MODULES = {"graphs": "push"}


def main() -> None:
    """Run the part and write numbers and reason; whatever it raises is the reason."""
    options, answer = json.loads(sys.argv[1]), Path(sys.argv[2])
    case = Case(options["part"], options["device"], Path(options["folder"]), options["engine"])
    reason = ""
    try:
        module = importlib.import_module(f"tests.gpu.part_{_MODULES.get(case.part, case.part)}")
        done = module.run(case)
        if inspect.iscoroutine(done):
            asyncio.run(done)
    except Exception as error:  # noqa: BLE001 - whatever ends a part is its result
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
    answer.write_text(json.dumps({"numbers": case.numbers, "reason": reason}))


if __name__ == "__main__":
    main()
