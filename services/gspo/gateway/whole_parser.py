"""One reading of an answer with tools: streamed and whole answers have the same calls, and bad calls are text.

vLLM's parsers read a stream piece by piece by other code than a whole answer, and the two differ where the policy
writes a call badly.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall, FunctionCall
from vllm.parser.abstract_parser import DelegatingParser, Parser
from vllm.renderers.chat_utils import make_tool_call_id

log = structlog.get_logger()
# vLLM logs a traceback for each call that it cannot read. The policy writes many.
for _name in ("vllm.tool_parsers", "vllm.parser", "vllm.reasoning"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)
Parsed = tuple[str | None, str | None, list[FunctionCall] | None]


class _WholeAnswers(Parser):  # type: ignore[misc]
    """The part before a parser of vLLM in a class of both."""

    variables: Mapping[str, Any]

    def __init__(self, *parts: Any, chat_template_kwargs: dict[str, Any] | None = None, **keys: Any) -> None:
        super().__init__(*parts, chat_template_kwargs={**self.variables, **(chat_template_kwargs or {})}, **keys)
        self._texts: list[str] = []
        self._token_ids: list[int] = []

    def parse(
        self,
        model_output: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> Parsed:
        """Thoughts, content and calls of an answer; never an error."""
        try:
            parsed: Parsed = super().parse(model_output, request, enable_auto_tools, model_output_token_ids)
            if parsed[2] and all(map(_has_arguments, parsed[2])):
                return parsed
            if isinstance(self, DelegatingParser):
                return (*self.extract_reasoning(model_output, request), None)
        except Exception as error:  # noqa: BLE001 - of a parser of vLLM, about what the policy wrote
            log.warning("answer_not_parsed", parser=str(self.tool_parser_cls), reason=repr(error)[:300])
        return None, model_output, None

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        """The whole answer at its end; without tools what vLLM's parser makes of each piece."""
        if self.tool_parser_cls is None or not request.tools or request.tool_choice == "none":
            return super().parse_delta(delta_text, delta_token_ids, request, prompt_token_ids, finished=finished)
        if prompt_token_ids is not None:
            self.set_prompt_token_ids(prompt_token_ids)
        self._texts.append(delta_text)
        self._token_ids += delta_token_ids
        return self._message(request) if finished else None

    def _message(self, request: Any) -> DeltaMessage | None:
        thoughts, content, calls = self.parse("".join(self._texts), request, True, self._token_ids)
        thoughts = thoughts if request.include_reasoning else None
        if not (thoughts or content or calls):
            return None
        deltas = [_delta(*call) for call in enumerate(calls or ())]
        return DeltaMessage(reasoning=thoughts, content=content, tool_calls=deltas)


def whole_parser(parser: type[Parser], variables: Mapping[str, Any]) -> type[Parser]:
    """A parser of vLLM that reads calls in whole answers alone.

    An answer with tools is streamed at its end, in one piece. Calls that the parser cannot read, or whose
    arguments are not a JSON object, stay the text that the policy wrote.

    Args:
        variables: Those of the chat template that a request has beside its own: whether an answer begins with thoughts
            may depend on them.
    """
    return type(f"Whole{parser.__name__}", (_WholeAnswers, parser), {"variables": variables})


def _has_arguments(call: FunctionCall) -> bool:
    """Whether the arguments of a call are a JSON object; without any they are an empty one."""
    try:
        return isinstance(json.loads(call.arguments or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def _delta(index: int, call: FunctionCall) -> DeltaToolCall:
    function = DeltaFunctionCall(name=call.name, arguments=call.arguments)
    return DeltaToolCall(id=call.id or make_tool_call_id(), type="function", index=index, function=function)
