"""From an OpenAI-style conversation to exact tokens, their authors and masks, for a trainer of your own."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from context import default_authors, load_model_files, loss_mask, read_message, response_mask


def training_row(model: str, conversation: str) -> dict[str, Any]:
    """`model`: a folder with a chat template; `conversation`: a JSON file of messages and tools."""
    authors = default_authors()
    given = json.loads(Path(conversation).read_text(encoding="utf-8"))
    messages = [read_message(number, row) for number, row in enumerate(given["messages"])]
    # What assistants said is to be learned; without an author of their own it is only shown.
    taught = [replace(m, author="demonstration") if m.role == "assistant" else m for m in messages]
    tokens = load_model_files(model).renderer(authors).initial(taught, given.get("tools"))
    return {
        "token_ids": tokens.token_ids.tolist(),
        "authors": [authors.name(code) for code in tokens.authors.tolist()],
        "response_mask": response_mask(tokens, authors).tolist(),
        "loss_mask": loss_mask(tokens, authors).tolist(),
    }


if __name__ == "__main__":
    row = training_row(sys.argv[1], sys.argv[2])
    for token, author, trained in zip(row["token_ids"], row["authors"], row["loss_mask"], strict=True):
        print(token, author, "trained" if trained else "")
