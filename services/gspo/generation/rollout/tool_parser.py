"""The tool calls in a turn of the policy, read by vLLM's own parsers, or the problem with them."""

import json
import logging
from contextlib import suppress
from typing import Any

from transformers import PreTrainedTokenizerBase
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

# Parts of a tool call in either format: the policy meant to call a tool.
_CALL_TOKENS = ("<tool_call>", "</tool_call>", "<function=")
_THOUGHT_ENDS = "</think>"
_FORMS = {
    "hermes": '<tool_call>\n{"name": NAME, "arguments": {NAME: VALUE}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=NAME>\n<parameter=NAME>\nVALUE\n</parameter>\n</function>\n</tool_call>",
}
# vLLM logs a traceback for each call that it cannot read; here that is an answer to the policy.
logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)


class ToolParser:
    """Reads calls of one format.

    Args:
        format_name: vLLM's name of the parser.
        tools: Descriptions of the tools.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, format_name: str, tools: list[dict[str, Any]]) -> None:
        self._tokenizer, self._format = tokenizer, format_name
        self._parser = ToolParserManager.get_tool_parser(format_name)
        self._parameters = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
        self._request = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], model="", tools=tools)

    def read(self, text: str) -> tuple[list[dict[str, Any]], str]:
        """The calls in the policy's text, which has its special tokens; calls within its thoughts do not count.

        Returns:
            The calls as {name, arguments}, and a problem because of which none is carried out; empty where there is
            none.
        """
        text = text.rpartition(_THOUGHT_ENDS)[2]
        # A parser for each text: it keeps the state of a stream.
        parsed = self._parser(self._tokenizer, self._request.tools).extract_tool_calls(text, self._request)
        if not parsed.tools_called:
            means_to_call = any(part in text for part in _CALL_TOKENS)
            return [], f"cannot be read; write {_FORMS[self._format]}" if means_to_call else ""
        calls = []
        for call in parsed.tool_calls:
            arguments = None
            with suppress(ValueError):
                arguments = json.loads(call.function.arguments or "{}")
            if problem := self._problem(call.function.name, arguments):
                return [], problem
            calls.append({"name": call.function.name, "arguments": arguments})
        return calls, ""

    def _problem(self, name: str, arguments: Any) -> str:
        parameters = self._parameters.get(name)
        if parameters is None:
            return f"names '{name}', which is not a tool; there are {', '.join(self._parameters)}"
        if not isinstance(arguments, dict):
            return f"gives '{name}' arguments that are not a JSON object"
        known = parameters.get("properties", {})
        if missing := [need for need in parameters.get("required", []) if need not in arguments]:
            return f"leaves out '{missing[0]}', which '{name}' needs"
        if unknown := [name for name in arguments if known and name not in known]:
            return f"gives '{name}' '{unknown[0]}', and it takes {', '.join(known)}"
        return ""
