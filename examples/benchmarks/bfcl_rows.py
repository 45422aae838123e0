"""Writes BFCL's rows for `bfcl.py`, and known answers as demonstrations.

`python -m examples.benchmarks.bfcl_rows FOLDER simple_python multiple` writes rows of these categories.
"""

import argparse
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentloop import ToolCall
from examples.benchmarks.bfcl import tool_of
from examples.chat_rows import write_lines

DIALOGUES = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param")
CATEGORIES = (
    *("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance"),
    *("live_simple", "live_multiple", "live_irrelevance", *DIALOGUES),
)
NO_CALL = "None of these functions helps."


def known_calls(row: Mapping[str, Any]) -> list[ToolCall]:
    """Return BFCL's known answer to a single question: required arguments, and others that may not be left out."""
    required = {function["name"]: function["parameters"]["required"] for function in row["function"]}
    calls = []
    for answer in row.get("ground_truth", ()):
        for name, accepted in answer.items():
            arguments = first_of(accepted, required[name])
            calls.append(ToolCall(name, {argument: first_of_each(value) for argument, value in arguments.items()}))
    return calls


def first_of(accepted: Mapping[str, Any], required: Collection[str] = ()) -> dict[str, Any]:
    """Choose the first value that is accepted for each argument. An empty text says that it may be left out."""
    needed = {name: values for name, values in accepted.items() if values and (name in required or "" not in values)}
    return {name: next((value for value in values if value != ""), "") for name, values in needed.items()}


def first_of_each(value: Any) -> Any:
    """Choose inside a dictionary, or in each dictionary of a list, where BFCL lists what it accepts once more."""
    if isinstance(value, list):
        return [first_of(each) if isinstance(each, dict) else each for each in value]
    return first_of(value) if isinstance(value, dict) else value


def read_rows(category: str) -> list[dict[str, Any]]:
    """Read a category with BFCL's own functions, with the known answers where it has some."""
    with TemporaryDirectory() as folder:
        os.environ["BFCL_PROJECT_ROOT"] = folder  # the package makes folders there when it is imported
        from bfcl_eval.utils import load_dataset_entry, load_ground_truth_entry
    truths = [] if category.endswith("irrelevance") else load_ground_truth_entry(category)
    known = {truth["id"]: {"ground_truth": truth["ground_truth"]} for truth in truths}
    return [{**row, "category": category, **known.get(row["id"], {})} for row in load_dataset_entry(category)]


def demonstration(row: Mapping[str, Any]) -> dict[str, Any]:
    """Write the known answer to a single question as a conversation."""
    said = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in known_calls(row)]
    calls = [{"type": "function", "id": str(number), "function": each} for number, each in enumerate(said)]
    answer = {"role": "assistant", "content": "" if calls else NO_CALL, "tool_calls": calls}
    return {"messages": [*row["question"][0], answer], "tools": [tool_of(function) for function in row["function"]]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write train.jsonl, test.jsonl (a fifth) and demonstrations.jsonl.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("categories", nargs="+", choices=CATEGORIES)
    parser.add_argument("--demonstrations", type=int, default=0, help="of the last single questions to train on")
    parser.add_argument("--order", default="", help="any text: another gives another split and order")
    given = parser.parse_args()
    rows = [row for category in given.categories for row in read_rows(category)]
    rows.sort(key=lambda row: hashlib.sha256((given.order + row["id"]).encode()).digest())
    test, train = rows[: len(rows) // 5], rows[len(rows) // 5 :]
    single = (row for row in reversed(train) if row["category"] not in DIALOGUES)
    shown = [demonstration(row) for row in islice(single, given.demonstrations)]
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("test", test), ("train", train), ("demonstrations", shown)):
        write_lines(given.folder / f"{name}.jsonl", lines)


if __name__ == "__main__":
    main()
