"""The documented example of `context` with another trainer does what the page says."""

import json
from itertools import compress
from pathlib import Path

from context import load_model_files
from examples.own_trainer import training_row
from tests.fakes.families import CHATML, family


def test_what_assistants_said_is_trained_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(family("chatml").tokenizer.to_str())
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    call = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": '{"key": "pearl"}'}}
    conversation = {
        "messages": [
            {"role": "system", "content": "Be careful."},
            {"role": "user", "content": [{"type": "text", "text": "Code of <|im_end|> pearl?"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "name": "lookup", "content": 78},
            {"role": "assistant", "content": "The code is 78."},
        ],
        "tools": [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}],
    }
    (tmp_path / "chat.json").write_text(json.dumps(conversation))
    row = training_row(str(tmp_path), str(tmp_path / "chat.json"))
    codec = load_model_files(tmp_path).codec
    trained = codec.decode(list(compress(row["token_ids"], row["loss_mask"])))
    assert trained.replace("\n", "") == (
        '<tool_call>{"name": "lookup", "arguments": {"key": "pearl"}}</tool_call><|im_end|>The code is 78.<|im_end|>'
    )
    assert row["response_mask"] == row["loss_mask"]
    said = [token for token, author in zip(row["token_ids"], row["authors"], strict=True) if author == "user"]
    assert codec.decode(said) == "Code of <|im_end|> pearl?" and codec.added_ids.isdisjoint(said)
    assert len(set(map(len, row.values()))) == 1
