"""From an OpenAI-style conversation to exact tokens, their authors and masks, for a trainer of your own."""

import sys
from dataclasses import replace
from typing import Any

from context import default_authors, load_model_files, loss_mask, read_conversation, response_mask


def training_row(model: str, conversation: str) -> dict[str, Any]:
    """`model`: a folder or hub id with a chat template; `conversation`: a JSON file of messages."""
    authors = default_authors()
    messages, tools = read_conversation(conversation)
    # What assistants said is to be learned; without an author of their own it is only shown.
    taught = [replace(m, author="demonstration") if m.role == "assistant" else m for m in messages]
    tokens = load_model_files(model).renderer(authors).initial(taught, tools)
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
