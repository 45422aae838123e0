"""A template with a tokenizer, as `context` loads a model's folder and as transformers has it."""

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from context import Message, Renderer, ToolCall, default_authors
from context.messages import to_template
from context.templates.model_files import load_model_files
from tests.fakes.real_templates import RealTemplate
from tests.fakes.tokenizer_kinds import lossless, tokenizer_kinds

Rows = list[dict[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Conversation = Sequence[Message]
_UNKNOWN = ("<unk>", "[UNK]")
"""What plain text turns into: of no control."""
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\n*(.*)", re.DOTALL)
_READS_THINKING = re.compile(r"""message(\.|\[["'])thinking\b""")


class Reference:
    """One template and one tokenizer, as transformers uses them."""

    def __init__(self, template: RealTemplate, tokenizer_json: str) -> None:
        self._tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(tokenizer_json),
            chat_template=template.text,
            clean_up_tokenization_spaces=False,
            **template.special_tokens,
        )
        added = json.loads(tokenizer_json)["added_tokens"]
        self.controls = {
            int(row["id"]): str(row["content"])
            for row in added
            if not row["content"].isspace() and row["content"] not in _UNKNOWN
        }
        """Ids and spellings of the tokens that only a template or a policy may write."""
        self._thinking = "reasoning_content" not in template.text and bool(_READS_THINKING.search(template.text))
        reads_thoughts = "</think>" in template.text and ("reasoning_content" in template.text or self._thinking)
        self._marks_thoughts = "</think>" in self.controls.values() and reads_thoughts
        """A thought in a content is given apart, for its marks are control tokens that a content may not hold."""
        self._json_arguments = self._fails(json_arguments=False) and not self._fails(json_arguments=True)
        self._parts = self._loses_text(parts=False) and not self._loses_text(parts=True)

    def text(self, messages: Sequence[Message], tools: Tools, *, prompted: bool = True) -> str | None:
        """The rendering; None: the template refuses."""
        return self._rendered([self._row(message) for message in messages], tools, prompted=prompted)

    def shows_all(self, messages: Sequence[Message], tools: Tools) -> bool:
        """Whether the template renders these messages, and leaves out no content of others and no reply as a whole."""
        text = self.text(messages, tools)
        if text is None:
            return False
        for place, message in enumerate(messages):
            if message.tool_calls:
                without = [*messages[:place], replace(message, tool_calls=()), *messages[place + 1 :]]
                if self.text(without, tools) == text:
                    return False
            elif not _holds(text, message.content.rpartition("</think>")[2].strip()):
                return False
        return True

    def ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def template_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """In one call, as people make it."""
        rows = [self._row(message) for message in messages]
        found: list[int] = self._tokenizer.apply_chat_template(
            rows, tools=list(tools) or None, add_generation_prompt=True, return_dict=False
        )
        return found

    def reply(
        self, before: Conversation, reply: Message, after: Conversation, tools: Tools, stops: Set[int]
    ) -> list[int] | None:
        """What the template writes for a reply, up to its stop token: the difference of two renderings, by ids.

        None: it does not go on from its prompt, does not end, or leaves out what is said. Where the next turn's header
        is what ends it, that is looked for before `after`.
        """
        prompt, whole = self.text(before, tools), self.text([*before, reply], tools, prompted=False)
        unasked = self.text(before, tools, prompted=False)
        if prompt is None or whole is None or unasked is None:
            return None
        asked, ids = self.ids(prompt), self.ids(whole)
        shared = next(
            (n for n, (a, b) in enumerate(zip(asked, ids, strict=False)) if a != b), min(len(asked), len(ids))
        )
        found = ids[shared:]
        if shared < len(asked):
            if whole.startswith(prompt):  # its first token would begin in the prompt
                found = self.ids(whole[len(prompt) :])
            elif shared <= len(self.ids(unasked)) < len(asked):
                return None
        if not stops.intersection(found):
            following = replace(after[0], content="q3following3q")
            more = self.text([*before, reply, following], tools, prompted=False) or ""
            header = [token for token in self.ids(more[: more.rfind(following.content)]) if token in stops][-1:]
            found = [*self.ids(whole.rstrip())[len(ids) - len(found) :], *header]
        end = next((n for n, token in enumerate(found, 1) if token in stops), None)
        return None if end is None or not self._says(found[:end], reply) else found[:end]

    def _says(self, ids: Sequence[int], reply: Message) -> bool:
        arguments = (value for call in reply.tool_calls for value in call.arguments.values())
        said = [reply.content, reply.reasoning or "", *(call.name for call in reply.tool_calls), *map(str, arguments)]
        return all(_holds(self.decode(ids), text.strip()) for text in said)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False))

    def _row(self, message: Message) -> dict[str, Any]:
        if self._marks_thoughts and message.role == "assistant" and (thought := _THOUGHT.fullmatch(message.content)):
            message = replace(message, reasoning=thought[1].strip("\n"), content=thought[2])
        row = to_template(message)
        if self._parts:
            row["content"] = [{"type": "text", "text": row["content"]}]
        for call in row.get("tool_calls", ()) if self._json_arguments else ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        if self._thinking and "reasoning_content" in row:
            row["thinking"] = row["reasoning_content"]
        return row

    def _rendered(self, rows: Rows, tools: Tools, *, prompted: bool) -> str | None:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    rows, tools=list(tools) or None, tokenize=False, add_generation_prompt=prompted
                )
            )
        except Exception:  # noqa: BLE001 (a template may raise anything)
            return None

    def _fails(self, *, json_arguments: bool) -> bool:
        self._json_arguments, self._parts = json_arguments, False
        called = Message("assistant", "", "llm", (ToolCall("f", {"x": "y"}, "call00001"),))
        return self._rendered([self._row(m) for m in (Message("user", "x"), called)], (), prompted=True) is None

    def _loses_text(self, *, parts: bool) -> bool:
        self._parts = parts
        text = self._rendered([self._row(Message("user", "marked text"))], (), prompted=True)
        return text is None or "marked text" not in text


def _holds(text: str, content: str) -> bool:
    spellings = (content, json.dumps(content, ensure_ascii=False)[1:-1], json.dumps(content)[1:-1])
    return any(spelling in text for spelling in spellings)


@dataclass
class Subject:
    template: RealTemplate
    kind: str
    renderer: Renderer
    reference: Reference
    lossless: bool


def subject(template: RealTemplate, kind: str, *, allow_hidden: bool = True) -> Subject:
    tokenizer_json = tokenizer_kinds()[kind](template.text)
    with TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
        (path / "tokenizer_config.json").write_text(json.dumps(dict(template.special_tokens)), encoding="utf-8")
        (path / "chat_template.jinja").write_text(template.text, encoding="utf-8")
        renderer = load_model_files(path).renderer(default_authors(), allow_hidden=allow_hidden)
    return Subject(template, kind, renderer, Reference(template, tokenizer_json), lossless(kind))
