"""What an environment is told of a prompt: the task that `reset` gets.

The reward service tries an environment with it before a run, the generator plays it. It renders and calls nothing.
"""

from __future__ import annotations

import json
from typing import Any

from gspo_proto.rollout_pb2 import Prompt


def task_json(prompt: Prompt) -> str:
    """`prompt` (text, or chat messages as given) and every other column of the data set, as a JSON object."""
    given: Any = json.loads(prompt.messages_json) if prompt.messages_json else prompt.text
    return json.dumps({"prompt": given, **json.loads(prompt.columns_json or "{}")})
