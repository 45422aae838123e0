"""What a server answers, in words for the policy."""

from __future__ import annotations

import json

from mcp.types import (
    AudioContent,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    TextContent,
    TextResourceContents,
)


def answer_text(result: CallToolResult) -> str:
    """Its texts, one below the other, with a line for what is no text; what has structure alone, as JSON."""
    parts = [_block_text(block) for block in result.content]
    if not any(isinstance(block, TextContent) for block in result.content) and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)


def _block_text(block: ContentBlock) -> str:
    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, ImageContent | AudioContent):
        return f"[{block.type} left out: {block.mime_type}]"
    if isinstance(block, EmbeddedResource):
        if isinstance(block.resource, TextResourceContents):
            return block.resource.text
        return f"[resource left out: {block.resource.uri}, {block.resource.mime_type or 'binary'}]"
    return f"[resource: {block.uri}]"
