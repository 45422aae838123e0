"""The commands of docs/small-model.md, typed in their order on a model of a test's size, print what the page shows."""

from importlib import import_module
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from context.templates.model_files import template_source
from tests.docs.blocks import blocks
from tests.docs.test_blocks import SMALL, checkout, typed
from tests.fakes.real_templates import real_template
from tests.fakes.runs import save_qwen2

pytestmark = pytest.mark.slow

MODEL = "models/SmolLM2-135M-Instruct"
SMALLER = [*SMALL, "context.max_tokens=1400", "run.iterations=2", "checkpoint.every=1"]
"""As of other pages; a small vocabulary needs more tokens for the same text."""
RUN = "examples/shop_agent/run.yaml"
SAYS = {
    f"agentloop context check {MODEL}": ["tools: left out"],
    f"agentloop context check {MODEL} --template hermes": ["tools: shown", "calls: shown", "results: shown"],
    "python -m examples.shop_agent.make_data": [],
    f"agentloop env check {RUN}": ["as the model is given it", "400 to train on, 128 held out", "0 for an empty reply"],
    f"agentloop evaluate --config {RUN} --model {MODEL}": ["held-out success: ", "pass@1", "ended: "],
    f"agentloop sft {RUN}": ["115 to train on, 13 held out, 0 left out", "memory: up to", "held-out loss "],
    f"agentloop env play {RUN} --model runs/shop-sft-001": ["You work in a shop", "How much is", "reward "],
    f"agentloop train {RUN} --set model.path=runs/shop-sft-001/model": ["disk: ", "before training: ", "trained model"],
    "agentloop evaluate runs/shop-001": ["held-out success: ", "pass@1", "ended: "],
    "agentloop replay ls runs/shop-001 --failed": ["reward"],
    "agentloop export runs/shop-001 --to my-agent": ["my-agent"],
}
"""The commands of the page, and what each prints, here as there, whatever the figures are."""


def words_of(command: str) -> list[str]:
    words = command.split()
    is_made_small = words[1] in ("train", "sft") or "--config" in words
    return words + [part for setting in SMALLER if is_made_small for part in ("--set", setting)]


def test_commands_of_the_page_work_in_their_order_and_print_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkout(tmp_path / "checkout")
    save_qwen2(folder / MODEL)
    (folder / MODEL / "chat_template.jinja").write_text(real_template("written/smollm2").text)
    page = [block for block in blocks() if block.place.startswith("docs/small-model.md:")]
    shown = "".join(block.text for block in page if block.language == "text")
    typed_here = [block for block in page if block.note and "test_small_model" in block.note[1]]
    commands = [command.partition("  #")[0].strip() for block in typed_here for command in block.commands()]
    assert commands == list(SAYS)
    monkeypatch.chdir(folder)
    for command in commands:
        if command.startswith("python "):
            import_module(command.split()[2]).main()
            continue
        code = typed(words_of(command), folder, monkeypatch)
        printed = capsys.readouterr().out
        assert code == 0 or "tools: left out" in printed, command
        assert [said for said in SAYS[command] if said not in printed or said not in shown] == [], command
    assert AutoTokenizer.from_pretrained("my-agent").chat_template == template_source("hermes")
    assert AutoModelForCausalLM.from_pretrained("my-agent").num_parameters() > 0
