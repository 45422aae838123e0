"""What would spoil a run is refused before it begins, each in one line and without a trace."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from agentloop.config import ModelSection, RunConfig
from agentloop.config.config_file import load_plain, to_plain
from agentloop.config.sections.context import ContextSection
from agentloop.config.sections.model import ComputeSection
from agentloop.engines.local.local_generator import LocalGenerator
from agentloop.environments import EnvironmentFactory, RunEnvironments, load_environment
from agentloop.errors import UserError
from agentloop.models.actor import Actor
from agentloop.models.loading import LoadedModel, load_model
from agentloop.models.memory import check_memory
from agentloop.rollouts.actors import checked_parser
from agentloop.training.startup_checks import check_disk, check_scoring
from agentloop.training.train import train
from context import ChatTemplate, Message
from context.templates.chat_template import LOOKUP
from context.templates.model_files import ModelFiles
from context.templates.template_report import check_template
from replay import ReplayError
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.real_templates import real_template
from tests.fakes.runs import PARITY, ROOT, SilentDisplay, save_llama, save_vllm_llama, small_config

GOALS = ENVIRONMENTS / "parity.py"
HINDSIGHT = "replay.fraction=0.5; replay.hindsight.enable=true; replay.sources={hindsight: 0.5, self: 0.5}"
AGENT = "environment={agent: 'true'}; tasks.data=HERE/tasks.jsonl"
REDACTOR = """
def fail(messages):
    raise ValueError("no idea")

def number(messages):
    return 3
"""


BEFORE = [
    ("loss.replay.objective=HERE/no.py:f", "loss.replay.objective must name a file that exists, got .*no.py"),
    ("replay.redact=HERE/hide.py:fial", r"replay.redact must name a function of .*'fial'. Did you mean fail\?"),
    ("replay.attach={x: nowhere}", "database must be an existing file, got nothing at nowhere"),
    ("replay.database='postgresql+psycopg:///x?host=/nowhere'", "must be a PostgreSQL database that can be reached"),
    ("advantage.credit=turn; replay.fraction=0.0", "must be trajectory when the environment has no turn_rewards, got"),
    ("replay.redact=HERE/hide.py:fail", "redact must take every trajectory's messages, got ValueError: no idea"),
    ("replay.redact=HERE/hide.py:number", "replay.redact must return messages or None, got int"),
    (HINDSIGHT, "replay.hindsight.enable must be false .*Parity. Write def achieved"),
    (f"{AGENT}; {HINDSIGHT}", "replay.hindsight.enable must be false .* got agent. An agent has no such method"),
]
"""Before the first checkpoint, which the first evaluation comes before."""
WITHIN = [
    (
        f"environment.name={GOALS}:Confused; replay.shortfall=shrink; {HINDSIGHT}",
        "Confused.achieved must return a list of Achieved, each with a first_turn of",
    ),
    (f"environment.name={PARITY.replace('Parity', 'NotANumber')}", r"NotANumber\.reward must return a finite number"),
]
"""What code of one's own must not do, which is seen once it is called: the run stays, to go on when that is mended."""


@pytest.mark.parametrize(("given", "message"), BEFORE + WITHIN)
def test_run_that_can_not_be_is_refused_in_one_line(tmp_path: Path, qwen2: Path, given: str, message: str) -> None:
    (tmp_path / "hide.py").write_text(REDACTOR)
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(40)))
    small = to_plain(small_config(tmp_path / "runs", qwen2))
    with pytest.raises((UserError, ReplayError), match=message) as refused:
        train(load_plain(small, given.replace("HERE", str(tmp_path)).split("; ")), display=SilentDisplay())
    assert "\n" not in str(refused.value)
    assert (len(list((tmp_path / "runs").glob("*"))) == 0) == ((given, message) in BEFORE)


FACTORY = load_environment("lookup_chain", {})
SMOLLM2 = real_template("written/smollm2").text


@pytest.fixture
def loaded(qwen2: Path) -> LoadedModel:
    return load_model(ModelSection(), qwen2)


def check(files: ModelFiles, factory: EnvironmentFactory = FACTORY, **context: Any) -> None:
    checked_parser(ContextSection.model_validate(context), RunEnvironments({factory.name: factory}), files)


def with_template(files: LoadedModel, source: str) -> LoadedModel:
    return replace(files, template=ChatTemplate(source, {}))


def calculator(prompt: str) -> EnvironmentFactory:
    """The calculator of the README with another prompt."""
    factory = load_environment(f"{ROOT / 'examples/calculator.py'}:Calculator", {})
    assert factory.example is not None
    return replace(factory, example=replace(factory.example, prompt=(Message("user", prompt),)))


def test_template_that_shows_tools_with_its_own_parser_passes(loaded: LoadedModel, tmp_path: Path) -> None:
    check(loaded)
    check(load_model(ModelSection(), save_llama(tmp_path / "llama")), parser="llama3_json")


def test_parser_that_can_not_read_the_templates_calls_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(UserError, match=r"parser must read the tool calls .* got Llama3JsonParser for '<tool_call>"):
        check(loaded, parser="llama3_json")


@pytest.mark.parametrize("parser", ["auto", "hermes", "react"])
def test_template_without_tools_is_refused_as_context_check_says_it(loaded: LoadedModel, parser: str) -> None:
    bare = with_template(loaded, SMOLLM2)
    with pytest.raises(UserError, match=r"must show every tool, got .* Set context\.template: hermes") as refused:
        check(bare, replace(calculator("How many?"), tools=(LOOKUP,)), parser=parser)
    assert str(refused.value) in check_template(bare).parts.values()


def test_tools_that_the_prompt_describes_need_a_parser_that_was_named(loaded: LoadedModel) -> None:
    bare = with_template(loaded, SMOLLM2)
    described = calculator("You have multiply(a, b).\nAction: multiply\nAction Input: {...}\nWhat is 3 times 4?")
    check(bare, described, parser="react")
    with pytest.raises(UserError, match="must show every tool"):
        check(bare, calculator("multiplying is done by you: what is 3 times 4?"), parser="react")
    with pytest.raises(UserError, match="must show every tool"):
        check(bare, described)
    # It shows them, but for prompts that look like the one that speaks of them.
    hides = "{% if 'multiply' in messages[0].content %}{% set tools = none %}{% endif %}" + loaded.template.source
    check(with_template(loaded, hides), described, parser="hermes")
    with pytest.raises(UserError, match="must show every tool"):
        check(with_template(loaded, hides), described)


@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
def test_model_with_a_state_the_cache_does_not_know_is_refused(autocast: Literal["none", "bfloat16"]) -> None:
    """Rounding by autocast hides no disagreement: it is measured without."""
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8, initializer_range=0.3)
    model, compute = MambaForCausalLM(config).eval(), ComputeSection(autocast=autocast)
    generator = LocalGenerator(model, stop_ids=frozenset([1]), compute=compute)
    with pytest.raises(
        UserError, match=r"must give the same log-probs when sampling and when scoring \(within 0.001 na"
    ):
        check_scoring(generator, Actor(model, compute=compute))


GB = 10**9


@pytest.mark.parametrize(
    ("checkpoint", "free", "said"),
    [
        ({"keep": 2, "best": None}, 90, "disk: 6.0 GB of 90.0 GB free in the end, and the buffer (checkpoints: 2 of "),
        # The first one, and those after iterations 4, 8 and 10; and the best policy.
        ({"keep": 9, "every": 4}, 90, "disk: 13.0 GB of 90.0 GB free in the end, and the buffer (checkpoints: 4 of "),
        ({"keep": 1, "keep_policies": 3}, 90, "1 of 3.0 GB, policies: 3 of 1.0 GB, the best one: 1.0 GB)."),
        (
            {"keep": 2, "keep_policies": "all"},
            21,  # before the last old checkpoint and the last old best policy go: 3 x 3 + 11 x 1 + 2 x 1
            "11 of 1.0 GB, the best one: 1.0 GB). Too much: lower checkpoint.keep or checkpoint.keep_policies.",
        ),
    ],
)
def test_disk_that_a_run_takes_is_said_before_it_begins(checkpoint: dict[str, Any], free: int, said: str) -> None:
    config = RunConfig.model_validate({"run": {"iterations": 10}, "checkpoint": checkpoint})
    assert said in check_disk(config, weights=GB, state=2 * GB, least_policies=0, free=free * GB)
    with pytest.raises(UserError, match=r"two checkpoints of 3.0 GB, got too little at runs \(5,900,000,000 bytes"):
        check_disk(config, weights=GB, state=2 * GB, least_policies=0, free=int(5.9 * GB))


def test_memory_that_an_update_takes_is_said_before_the_first(loaded: LoadedModel) -> None:
    actor, config = Actor(loaded.model), RunConfig()
    held = GB + sum(weight.numel() * (4 + 4) for weight in loaded.model.parameters())
    least = check_memory(actor, config, state=GB, there=10 * GB)
    assert least.startswith("memory: up to 1.") and "a pass of 1,536 tokens " in least and "Too much" not in least
    assert check_memory(actor, config, state=GB, there=held).endswith(
        "Too much: lower batch.micro_batch_tokens, or set compute.gradient_checkpointing: true."
    )
    with pytest.raises(UserError, match=r"got 1\.0 GB where there are 1\.0 GB\. Train adapters \(lora\.rank\)"):
        check_memory(actor, config, state=GB, there=held - 1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_disk_said_is_the_disk_taken(tmp_path: Path, dtype: str) -> None:
    sizes = {"run": {"iterations": 2}, "checkpoint": {"keep_policies": 2}}
    config = to_plain(small_config(tmp_path / "runs", save_vllm_llama(tmp_path / "model"), **sizes))
    display = SilentDisplay()
    run = train(load_plain(config, [f"model.dtype={dtype}"]), display=display).folder
    (said,) = [note for note in display.notes if note.startswith("disk: ")]
    folders = [run / "checkpoints", run / "policies"]
    taken = sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())
    assert float(said.split()[1]) == pytest.approx(taken / 1e6, rel=0.2)
    assert said.split()[2] == "MB"
