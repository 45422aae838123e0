"""Chat templates of families whose own ones no installed package carries, written from the documented formats.

They know a user, a reply with thinking, text and calls, and tool results; nothing of how the real ones show tools.
"""

from __future__ import annotations

_TEMPLATE = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ 'REPLY' }}
{%- if m.reasoning_content %}{{ 'OPEN' + m.reasoning_content + 'CLOSE' }}{% endif %}
{{- m.content }}
{%- if m.tool_calls %}CALLS{% endif %}
{{- 'END' }}
{%- else %}{{ 'OTHER' + m.content + 'END' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'REPLY' }}{% endif %}"""
_EACH = "{%- for call in m.tool_calls %}{% set f = call.function %}"
_JSON_LIST = (
    "{{- '[' }}" + _EACH + """{{ '{"name": "' + f.name + '", "arguments": ' }}{{ f.arguments | tojson }}{{ '}' }}"""
    "{%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' }}"
)
_NAMED = "{{ f.name + 'SEP' }}{{ f.arguments | tojson }}"


_THINK = ("<think>\\n", "\\n</think>\\n\\n")


def _template(calls: str, *, reply: str, other: str, end: str, thinking: tuple[str, str] = _THINK) -> str:
    source = _TEMPLATE
    # The calls come last: they spell some of these words.
    for name, text in zip(
        ("REPLY", "OTHER", "END", "OPEN", "CLOSE", "CALLS"), (reply, other, end, *thinking, calls), strict=True
    ):
        source = source.replace(name, text)
    return source


_CHATML = {"reply": "<|im_start|>assistant\\n", "other": "<|im_start|>user\\n", "end": "<|im_end|>\\n"}
_COHERE = {
    "reply": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "other": "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>",
    "end": "<|END_OF_TURN_TOKEN|>",
}
_DEEPSEEK = {"reply": "<｜Assistant｜>", "other": "<｜User｜>", "end": "<｜end▁of▁sentence｜>"}
_COHERE_LIST = (
    "{{- '[\\n' }}" + _EACH + """{{ '    {"tool_name": "' + f.name + '", "parameters": ' }}"""
    "{{ f.arguments | tojson }}{{ '}' }}{%- if not loop.last %}{{ ',\\n' }}{% endif %}{% endfor %}{{ '\\n]' }}"
)

CALL_TEMPLATES: dict[str, str] = {
    "deepseek_v31": _template(
        "{{- '<｜tool▁calls▁begin｜>' }}"
        + _EACH
        + "{{ '<｜tool▁call▁begin｜>' }}"
        + _NAMED.replace("SEP", "<｜tool▁sep｜>")
        + "{{ '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}",
        **_DEEPSEEK,
    ),
    "nemotron": _template(
        "{{- '<TOOLCALL>' }}" + _JSON_LIST + "{{ '</TOOLCALL>' }}",
        reply="<SPECIAL_11>Assistant\\n",
        other="<SPECIAL_11>User\\n",
        end="\\n<SPECIAL_12>\\n",
    ),
    "command_r": _template("{{- '\\nAction:\\n```json\\n' }}" + _COHERE_LIST + "{{ '```' }}", **_COHERE),
    "llama4_pythonic": _template(
        "{{- '[' }}"
        + _EACH
        + "{{ f.name + '(' }}{% for key, value in f.arguments.items() %}{{ key + '=' }}{{ value | tojson }}"
        "{%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ')' }}{% if not loop.last %}{{ ', ' }}{% endif %}"
        "{% endfor %}{{ ']' }}",
        reply="<|header_start|>assistant<|header_end|>\\n\\n",
        other="<|header_start|>user<|header_end|>\\n\\n",
        end="<|eot|>",
    ),
    "react": _template(
        _EACH + "{{ '\\nAction: ' + f.name + '\\nAction Input: ' }}{{ f.arguments | tojson }}{% endfor %}", **_CHATML
    ),
}
"""Templates by the name of the format."""
