"""Tool calls in plain text (ReAct), for models without a format of their own."""

import re

from context.messages import ToolCall
from context.parse.json_calls import json_at
from context.parse.reply import CallParser, Malformed, ReadCalls, check_length, check_tool_name


class ReactParser(CallParser):
    """Lines that begin with `Action:` and `Action Input:` (a JSON object), or with `Final Answer:`.

    Plain text, for models without a format of their own: ReAct, https://arxiv.org/abs/2210.03629. What comes before the
    final answer is thinking. A reply without any of these lines is an answer as a whole; text behind the JSON is left
    out.
    """

    stop_strings = ("Observation:",)
    """What the environment writes, and a policy would go on with."""
    _LABEL = re.compile(r"^[ \t]*(Action Input|Action|Final Answer|Observation)[ \t]*:[ \t]*", re.MULTILINE)

    def _read_calls(self, text: str) -> ReadCalls:
        found = self._LABEL.search(text)
        if found is None:
            return ReadCalls(text)
        before = text[: found.start()].removesuffix("\n")
        if found[1] == "Final Answer":
            return ReadCalls(text[found.end() :].strip(), thoughts=before or None)
        check_length(len(text) - found.start())
        _, *parts = self._LABEL.split(text)
        return ReadCalls(before, tuple(_labelled_calls(parts[::2], parts[1::2])))


def _labelled_calls(labels: list[str], bodies: list[str]) -> list[ToolCall]:
    if "Observation" in labels:
        raise Malformed('"Observation:" is not for the policy to write')
    if "Final Answer" in labels:
        raise Malformed("there is a final answer after a tool call")
    if labels != ["Action", "Action Input"] * (len(labels) // 2):
        raise Malformed('"Action:" and "Action Input:" must take turns')
    calls = []
    for name, text in zip(bodies[::2], bodies[1::2], strict=True):
        arguments, _ = json_at(text, 0)
        if not isinstance(arguments, dict):
            raise Malformed('"Action Input:" is not a JSON object')
        calls.append(ToolCall(check_tool_name(name.strip()), arguments))
    return calls
