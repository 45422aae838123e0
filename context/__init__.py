"""The text that the model saw and who wrote it: exact tokens, their authors, and the masks that follow."""

from context.authors import Author, AuthorTable, default_authors
from context.manager import ContextManager
from context.messages import Message, ToolCall
from context.openai_messages import read_message
from context.parse import HermesParser, ReactParser, Reply, ReplyParser, choose_parser
from context.templates.chat_template import ChatTemplate, RenderError
from context.templates.model_files import ModelFiles, load_model_files
from context.templates.render import Renderer
from context.tokens.codec import TokenCodec
from context.tokens.loss_mask import loss_mask, response_mask
from context.tokens.token_sequence import NOT_SAMPLED, Segment, TokenSequence

__all__ = [
    "NOT_SAMPLED",
    "Author",
    "AuthorTable",
    "ChatTemplate",
    "ContextManager",
    "HermesParser",
    "Message",
    "ModelFiles",
    "ReactParser",
    "RenderError",
    "Renderer",
    "Reply",
    "ReplyParser",
    "Segment",
    "TokenCodec",
    "TokenSequence",
    "ToolCall",
    "choose_parser",
    "default_authors",
    "load_model_files",
    "loss_mask",
    "read_message",
    "response_mask",
]
