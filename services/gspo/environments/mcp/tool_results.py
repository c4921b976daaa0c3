"""The text of a tool's result, as the policy sees it, within a limit."""

import json

from mcp_types import CallToolResult, ContentBlock, EmbeddedResource, TextContent, TextResourceContents

from gspo.common.plain_json import whole_text

EMPTY = "(no result)"


def text_of_result(result: CallToolResult) -> str:
    """The texts of a result, each other content by its kind; the structured content where there is nothing else."""
    texts = [text for block in result.content if (text := _text_of(block))]
    if not texts and result.structured_content is not None:
        texts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return str(whole_text("\n".join(texts))) or EMPTY


def _text_of(block: ContentBlock) -> str:
    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
        return block.resource.text
    return f"({block.type}, which cannot be shown)"


def cut(text: str, max_chars: int) -> str:
    """A text that is no longer than max_chars, or its beginning with a note of its length."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}... ({len(text)} characters)"
