"""An agent as anybody would write it, with the package `openai` alone: it multiplies with a tool.

`agent.path` in a configuration names it, and `gspo run` plays the rollouts with it; so does `gspo agent` from any
machine. Nothing in the loop is gspo's: `task` has the address and the key of its calls.
"""

import json
import re
from typing import Any

from openai import AsyncOpenAI

MAX_CALLS = 4
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Multiplies two numbers.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]


async def play(task: Any) -> float:
    """Answer one product, with the tool as often as the policy calls it; 1 for the right answer."""
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        messages: list[Any] = list(task.messages)
        for _ in range(MAX_CALLS):
            reply = await client.chat.completions.create(model=task.model, messages=messages, tools=TOOLS)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return float((message.content or "").strip() == task.columns["answer"])
            for call in message.tool_calls:
                result = multiply(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def multiply(arguments: str) -> str:
    """The result of a call, or its error."""
    try:
        factors = re.fullmatch(r"\s*(\d{1,6})\s*\*\s*(\d{1,6})\s*", json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError):
        return "error: expression is missing"
    return str(int(factors[1]) * int(factors[2])) if factors else "error: only products of two numbers"
