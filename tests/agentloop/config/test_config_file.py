import importlib
import json
import time
from pathlib import Path

import pytest
import yaml

from agentloop.config import RunConfig, strict_yaml
from agentloop.config.config_file import load_config, load_plain, to_plain
from agentloop.config.describe import describe_config, reference_yaml
from agentloop.config.keys import KEY_OF_NAME_ELSEWHERE, Key, schema_entries
from agentloop.errors import UserError
from tests.fakes.refusals import refusal_of

CONFIGS = Path(__file__).parents[3] / "configs"


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, *overrides: str) -> str:
    """The one line a file is refused with, without the folder in front."""
    path = write(folder, text)
    return refusal_of(load_config, path, overrides).replace(f"{folder}/", "")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.5e-3", 1.5e-3),
        ("no", "no"),
        ("'1'", "1"),
        ("2026-01-01", "2026-01-01"),
        ("~", None),
        ("-3", -3),
        ("1_000", "1_000"),
    ],
)
def test_scalars_are_read_by_yaml_1_2(tmp_path: Path, text: str, value: object) -> None:
    found = load_config(write(tmp_path, f"environment: {{options: {{x: {text}}}}}")).environment.options["x"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("libyaml", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 20_000,
        "a: " + "[" * 400_000,
        "a: " + "{a: " * 20_000,
        "\n".join(" " * depth + "a:" for depth in range(500)),
        "a: &a [x, x]\n" + "\n".join(f"b{i}: [*a, *a]" for i in range(40)),
        "a: [1\nb: 2",
        "run:\n\tseed: 1",
        "a: '\n" * 10,
    ],
)
def test_hostile_yaml_ends_at_once(tmp_path: Path, text: str, libyaml: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not libyaml:
        monkeypatch.delattr(yaml, "CBaseLoader")
    importlib.reload(strict_yaml)
    started = time.process_time()
    message = refusal(tmp_path, text)
    assert time.process_time() - started < 1.0
    assert message.startswith("run.yaml:")
    monkeypatch.undo()
    importlib.reload(strict_yaml)


def test_override_wins_over_the_file_and_the_last_one_over_the_first(tmp_path: Path) -> None:
    path = write(tmp_path, "replay: {fraction: 0.1}\nmodel: {path: x}\n")
    overrides = [
        "replay.fraction=0.2",
        "replay.fraction=0.3",
        "model.path=",
        "environment.options.hops=[2, 3]",
        "replay={sampler: uniform}",
        "tasks.data={split}.jsonl",  # a placeholder
    ]
    config = load_config(path, overrides)
    assert (config.replay.fraction, config.replay.sampler) == (0.3, "uniform")
    assert (config.model.path, config.tasks.data) == (None, "{split}.jsonl")
    assert config.environment.options == {"hops": [2, 3]}


def test_describe_config_is_yaml_that_reads_back_equal(tmp_path: Path) -> None:
    options = 'environment.options={a: [1e-5, "1e-5", null, "yes", "é"], "b c": "x\\x7f\\n", d: {e: true}}'
    config = load_config(CONFIGS / "quickstart.yaml", [options, "optimizer.learning_rate=1e-7"])
    text = describe_config(config)
    assert load_config(str(write(tmp_path, text))) == config
    assert yaml.safe_load(text) == to_plain(config)  # readers of YAML 1.1 agree
    assert "  fraction: 0.25  # default: 0.0" in text
    assert "  # Share of the batch's trajectories drawn from the buffer. (a number from 0 to 1)" in text


def test_reference_file_is_current() -> None:
    current = (CONFIGS / "reference.yaml").read_text(encoding="utf-8")
    assert current == reference_yaml(), "python -m agentloop.config.describe > configs/reference.yaml"


def test_home_is_known_in_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    given = {"run": {"folder": "~/runs"}, "model": {"path": "~/m"}, "reward": {"functions": [{"function": "~/a.py:f"}]}}
    config = load_plain(given, ["tasks.data=~/rows.jsonl", "environment.name=rows"], source="test")
    paths = [config.run.folder, config.model.path, config.tasks.data, config.reward.functions[0].function]
    assert list(map(str, paths)) == [f"/home/me/{name}" for name in ("runs", "m", "rows.jsonl", "a.py:f")]


def test_named_model_has_defaults_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: mine}\nrollout: {max_turns: 5}\n")
    config = load_config(path, ["batch.mini_batch=16"])
    assert (config.optimizer.learning_rate, config.critic.optimizer.learning_rate) == (1e-6, 1e-5)
    assert (config.rollout.max_tokens_per_turn, config.context.max_tokens) == (512, 4096)
    assert (config.rollout.max_turns, config.batch.mini_batch) == (5, 16)
    assert load_plain(json.loads(json.dumps(to_plain(config)))) == config
    assert load_config(write(tmp_path, "rollout: {max_turns: 5}"), ["model.path=mine", "batch.mini_batch=16"]) == config
    # Without a model, and with one that is taken back, those of the built-in one.
    assert load_config(write(tmp_path, "model: {path: mine}"), ["model.path=null"]) == RunConfig()


def test_defaults_that_depend_on_the_model_are_explained_and_shown() -> None:
    both = "# Default: 0.0015; where model.path names a model: 1.0e-06.\n  learning_rate:"
    assert f"{both} 0.0015\n" in describe_config(RunConfig())
    config = load_config(CONFIGS / "model.yaml", ["model.path=mine"])
    assert f"{both} 1.0e-06\n" in describe_config(config)
    assert "# default: 60" not in describe_config(config)


def test_value_that_a_file_leaves_to_the_command_line_must_be_given() -> None:
    with pytest.raises(UserError, match=r"model\.yaml:\d+: model\.path must be given, got \?\?\?\. Add --set model"):
        load_config(CONFIGS / "model.yaml")


def test_quickstart_is_found_by_its_name_where_no_file_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = load_config(Path("configs/quickstart.yaml"))
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("quickstart")) == own
    assert own.run.name == "quickstart"
    Path("quickstart").write_text("run: {name: mine}")
    assert load_config(Path("quickstart")).run.name == "mine"


def test_names_of_other_libraries_lead_to_known_keys_and_are_none_themselves() -> None:
    known = {".".join(path) for path, key in schema_entries().items() if isinstance(key, Key)}
    assert {*KEY_OF_NAME_ELSEWHERE.values()} <= known
    assert known & {*KEY_OF_NAME_ELSEWHERE} == set()


AT_LEAST_1 = "batch.trajectories must be a whole number of at least 1"
TRICKS = "must not use YAML anchors, aliases or tags, got"


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (
            "replay:\n  fraction: 1.5\n",
            "run.yaml:2: replay.fraction must be a number from 0 to 1, got 1.5. "
            "It is: Share of the batch's trajectories drawn from the buffer. Default: 0.0.",
        ),
        ("replay:\n  fracton: 0.2\n", "run.yaml:2: replay.fracton must be a known key, got an unknown one. Did "),
        ("modle: x\n", "run.yaml:1: modle must be a known key, got an unknown one. Did you mean model?"),
        ("\nlearning_rate: 3\n", "run.yaml:2: learning_rate must be a known key, got an unknown one. Did you mean "),
        (
            "sft: {lr: 1}",
            "run.yaml:1: sft.lr must be a known key, got an unknown one. Here that is sft.learning_rate: P",
        ),
        ("bf16: true", "run.yaml:1: bf16 must be a known key, got an unknown one. Here that is compute.autocast: "),
        (
            "num_generations: 8",
            "run.yaml:1: num_generations must be a known key, got an unknown one. Here that is batch.g",
        ),
        ('"a\\n\\e[31m": 1', r"run.yaml:1: a\n\x1b[31m must be a known key"),
        ("- 1\n", "run.yaml:1: the file must hold keys and values, got [1]. See configs/reference.yaml."),
        ("run:\n  seed: 1\n  seed: 2\n", "run.yaml:3: run.seed must be given once, got it on line 2 too. Keep one."),
        ("a: 1\né: &x 1\nb: *x\n", f"run.yaml:2: the file {TRICKS} `&x 1`. Write plain values out."),
        ("run: !!python/object/apply:os.system [ls]\n", f"run.yaml:1: the file {TRICKS} `!!python/object/apply:os.sys"),
        ("a: 1\n---\nb: 2\n", "run.yaml:2: the file must be valid YAML, got: found another document."),
        ("? [a]\n: 1\n", "run.yaml:1: the file must have text as keys, got a list or a mapping."),
        ("optimizer: {learning_rate: .inf}", "run.yaml:1: optimizer.learning_rate must be a finite number, got .inf."),
        ("a: \0", "run.yaml: the file must be readable text, got: control characters are not allowed."),
        ("replay:\n  fraction: 0.1\n  weight: 2\n", "run.yaml:3: replay.weight must be left at 1.0 when loss.normal"),
        ("batch: {trajectories: true}", f"run.yaml:1: {AT_LEAST_1}, got true."),
        ("batch: {trajectories: 128.5}", f"run.yaml:1: {AT_LEAST_1}, got 128.5."),
        ("run: {name: 12}", "run.yaml:1: run.name must be text matching ^[A-Za-z0-9_.-]{1,64}$, got 12."),
        ("model: {trust_remote_code: yes}", "run.yaml:1: model.trust_remote_code must be true or false, got 'yes'."),
        ("optimizer: {schedule: step}", "run.yaml:1: optimizer.schedule must be constant, linear or cosine"),
        ("environment: {task_pool: all}", "run.yaml:1: environment.task_pool must be a whole number of at least 1 or"),
        ("optimizer: {betas: [1, x]}", "run.yaml:1: optimizer.betas must be a list of 2: a number of at least 0 and b"),
        ("run: {<<: {seed: 1}}", "run.yaml:1: run.<< must be a known key, got an unknown one."),
        ("replay: {fraction: 2, weight: -1}\nrun: {seed: -1}\n", "run.yaml:2: run.seed must be"),
    ],
)
def test_load_config_refuses_in_one_line_with_the_place(tmp_path: Path, text: str, start: str) -> None:
    found = refusal(tmp_path, text)
    assert found.startswith(start)
    assert found.endswith("(3 keys are wrong; this is the first.)") == ("seed: -1" in text)


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("replay.fraction=1.5", "replay.fraction must be a number from 0 to 1, got 1.5."),
        ("trainer.foo=1", "trainer.foo must be a known key, got an unknown one. The keys: algorithm, run, model, "),
        ("replay.fraction", "an override must be dotted.key=value, got no =."),
        ("=1", "an override must be dotted.key=value, got no key."),
        ("run.seed=*x", f"run.seed {TRICKS} `*x`. Write plain values out."),
        ("run.seed=[", "run.seed must be valid YAML"),
        ("run.seed.x=1", "run.seed must be a mapping to have keys below it, got 0."),
        ("replay=3", "replay must be a section of keys, got 3."),
    ],
)
def test_override_is_refused_in_the_same_form(tmp_path: Path, override: str, start: str) -> None:
    assert refusal(tmp_path, "run: {seed: 0}", override).startswith(f"override {override}: {start}")
