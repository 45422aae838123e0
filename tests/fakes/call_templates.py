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
_INST = {"reply": "[REPLY]", "other": "[INST]", "end": "</s>", "thinking": ("[THINK]", "[/THINK]")}
_ROLE = {"reply": "<|assistant|>", "other": "<|user|>", "end": "<|end|>"}
_COHERE = {
    "reply": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "other": "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>",
    "end": "<|END_OF_TURN_TOKEN|>",
}
_DEEPSEEK = {"reply": "<｜Assistant｜>", "other": "<｜User｜>", "end": "<｜end▁of▁sentence｜>"}
_COHERE_LIST = (
    "{{- '[\\n' }}" + _EACH + """{{ '    {IDS"tool_name": "' + f.name + '", "parameters": ' }}"""
    "{{ f.arguments | tojson }}{{ '}' }}{%- if not loop.last %}{{ ',\\n' }}{% endif %}{% endfor %}{{ '\\n]' }}"
)

CALL_TEMPLATES: dict[str, str] = {
    "mistral_v3": _template(
        "{{- '[TOOL_CALLS] [' }}"
        + _EACH
        + """{{ '{"name": "' + f.name + '", "arguments": ' }}{{ f.arguments | tojson }}{{ ', "id": "' }}"""
        """{{- call.id + '"}' }}"""
        "{%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' }}",
        **_INST,
    ),
    "mistral_v11": _template(
        _EACH
        + "{{ '[TOOL_CALLS]' + f.name + '[CALL_ID]' + call.id + '[ARGS]' }}{{ f.arguments | tojson }}{% endfor %}",
        **_INST,
    ),
    "mistral_v13": _template(
        _EACH + "{{ '[TOOL_CALLS]' + f.name + '[ARGS]' }}{{ f.arguments | tojson }}{% endfor %}", **_INST
    ),
    "deepseek_v31": _template(
        "{{- '<｜tool▁calls▁begin｜>' }}"
        + _EACH
        + "{{ '<｜tool▁call▁begin｜>' }}"
        + _NAMED.replace("SEP", "<｜tool▁sep｜>")
        + "{{ '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}",
        **_DEEPSEEK,
    ),
    "kimi": _template(
        "{{- '<|tool_calls_section_begin|>' }}"
        + _EACH
        + "{{ '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}{{ f.arguments | tojson }}"
        "{{ '<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_section_end|>' }}",
        reply="<|im_assistant|>assistant<|im_middle|>",
        other="<|im_user|>user<|im_middle|>",
        end="<|im_end|>",
        thinking=("<think>", "</think>"),
    ),
    "granite": _template(
        "{{- '<|tool_call|>' }}" + _JSON_LIST,
        reply="<|start_of_role|>assistant<|end_of_role|>",
        other="<|start_of_role|>user<|end_of_role|>",
        end="<|end_of_text|>\\n",
    ),
    "phi4_mini": _template("{{- '<|tool_call|>' }}" + _JSON_LIST + "{{ '<|/tool_call|>' }}", **_ROLE),
    "nemotron": _template(
        "{{- '<TOOLCALL>' }}" + _JSON_LIST + "{{ '</TOOLCALL>' }}",
        reply="<SPECIAL_11>Assistant\\n",
        other="<SPECIAL_11>User\\n",
        end="\\n<SPECIAL_12>\\n",
    ),
    "jamba": _template(
        "{{- '<tool_calls>' }}" + _JSON_LIST + "{{ '</tool_calls>' }}",
        reply="<|bom|><|assistant|> ",
        other="<|bom|><|user|> ",
        end="<|eom|>",
    ),
    "command_r": _template(
        "{{- '\\nAction:\\n```json\\n' }}" + _COHERE_LIST.replace("IDS", "") + "{{ '```' }}", **_COHERE
    ),
    "command_a": _template(
        "{{- '<|START_ACTION|>' }}"
        + _COHERE_LIST.replace("IDS", """"tool_call_id": "' + call.id + '", """)
        + "{{ '<|END_ACTION|>' }}",
        **_COHERE,
        thinking=("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "minimax": _template(
        "{{- '\\n<minimax:tool_call>\\n' }}"
        + _EACH
        + """{{ '<invoke name="' + f.name + '">\\n' }}{% for key, value in f.arguments.items() %}"""
        """{{- '<parameter name="' + key + '">' }}"""
        "{{- value if value is string else value | tojson }}{{ '</parameter>\\n' }}{% endfor %}"
        "{{- '</invoke>\\n' }}{% endfor %}{{ '</minimax:tool_call>' }}",
        reply="]~b]ai\\n",
        other="]~b]user\\n",
        end="[e~[\\n",
    ),
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
"""By the name of the format; `granite` is that of Granite 3."""
