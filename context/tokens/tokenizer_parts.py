"""A tokenizer file taken apart: which of its added tokens control, and tokenizers that know fewer of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

Description = dict[str, Any]
SENTENCEPIECE_SPACE = "\u2581"
_OTHER = "[other]"


def whole_text_rules_off(description: Description) -> Description:
    """Without what is no part of a text: special tokens around it, truncation, padding, dropout, stripping decoders."""
    found = {**description, "truncation": None, "padding": None, "post_processor": None}
    found["model"] = {**found["model"]}
    if found["model"].get("dropout") is not None:
        found["model"]["dropout"] = None
    return _each_part(found, "decoder", "decoders", _without_first_space)


def inside_a_text(description: Description) -> Description:
    """For a text that has another one before it: what is put in front of the first word of a text alone is not."""
    return _each_part(description, "pre_tokenizer", "pretokenizers", _behind_the_first)


def control_tokens(description: Description, special: Collection[str]) -> list[dict[str, Any]]:
    """The added tokens, special or not, but for those that stand for plain text.

    White space carries no control, nor does the unknown token, which plain text turns into, or a single character that
    is not special. A token of `special`, the model's own by name, is none of these.
    """
    model = description["model"]
    unknown = {model.get("unk_token")}
    if isinstance(model["vocab"], list) and model.get("unk_id") is not None:
        unknown.add(model["vocab"][model["unk_id"]][0])
    rows = []
    for row in description["added_tokens"]:
        content = str(row["content"])
        blank = content.replace(SENTENCEPIECE_SPACE, " ").isspace()
        letter = len(content) == 1 and not row.get("special")
        if content in special or not (blank or letter or content in unknown):
            rows.append(row)
    return rows


def without_control_tokens(description: Description, control: Collection[int]) -> Tokenizer:
    """The tokenizer, ignorant of control tokens: as added tokens, vocabulary entries and merge results.

    Leaving them in the vocabulary would be a way in: merges can spell them, and `ignore_merges` looks words up whole.
    """
    model = dict(description["model"])
    plain = [row for row in description["added_tokens"] if row["id"] not in control]
    if isinstance(model["vocab"], dict):
        removed = {token for token, token_id in model["vocab"].items() if token_id in control}
        model["vocab"] = {token: i for token, i in model["vocab"].items() if token not in removed}
        # An added token outside the vocabulary would be numbered anew; as an entry it keeps its id.
        model["vocab"].update({row["content"]: row["id"] for row in plain})
        if removed and "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if removed.isdisjoint(_mentioned(pair))]
    else:
        model["vocab"] = _pieces_without(model["vocab"], plain, control)
    return tokenizer_of({**description, "added_tokens": plain, "model": model})


def only_control_tokens(description: Description, control: Sequence[Mapping[str, Any]]) -> Tokenizer:
    """The tokenizer that numbers these control tokens from 1, and takes all that stands between them for one word."""
    model = {"type": "WordLevel", "vocab": {_OTHER: 0}, "unk_token": _OTHER}
    added = [{**row, "id": number} for number, row in enumerate(control, 1)]
    return tokenizer_of({**description, "model": model, "added_tokens": added, "pre_tokenizer": None, "decoder": None})


def _pieces_without(
    vocabulary: Sequence[Sequence[Any]], plain: Sequence[Mapping[str, Any]], control: Collection[int]
) -> list[list[Any]]:
    """Unigram's list of pieces, where the place is the id; plain added tokens behind its end keep theirs."""
    worst = min((score for _, score in vocabulary), default=0.0) - 100.0
    size = max([len(vocabulary), *(row["id"] + 1 for row in plain)])
    pieces = [list(row) for row in vocabulary] + [["", worst] for _ in range(size - len(vocabulary))]
    for row in plain:
        if row["id"] >= len(vocabulary):
            pieces[row["id"]] = [row["content"], worst]
    return [["", score] if place in control else [piece, score] for place, (piece, score) in enumerate(pieces)]


def _each_part(description: Description, kind: str, parts: str, change: Any) -> Description:
    component = description.get(kind)
    if component is None:
        return description
    rows = component[parts] if component["type"] == "Sequence" else [component]
    kept = [row for row in map(change, rows) if row is not None]
    return {**description, kind: {"type": "Sequence", parts: kept} if kept else None}


def _without_first_space(decoder: dict[str, Any]) -> dict[str, Any] | None:
    """Decoders take the space of the first word away again, which stands inside a text here."""
    if decoder["type"] == "Strip" and decoder.get("content") == " ":
        return None
    return _never_first(decoder)


def _behind_the_first(component: dict[str, Any]) -> dict[str, Any]:
    return _never_first(component) if component.get("prepend_scheme") == "first" else component


def _never_first(component: dict[str, Any]) -> dict[str, Any]:
    if component["type"] == "Metaspace":
        rest = {key: value for key, value in component.items() if key != "add_prefix_space"}
        return {**rest, "prepend_scheme": "never"}
    return {**component, "add_prefix_space": False} if "add_prefix_space" in component else component


def tokenizer_of(description: Description) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(description))


def _mentioned(merge: str | Sequence[str]) -> tuple[str, str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right
