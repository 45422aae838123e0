from __future__ import annotations

import importlib
import json
import resource
import time
from pathlib import Path

import pytest
import yaml

from agentloop.config import RunConfig, strict_yaml
from agentloop.config.config_file import describe_config, load_config, load_plain, to_plain
from agentloop.config.describe import reference_yaml
from agentloop.config.keys import dotted_keys
from agentloop.errors import UserError

CONFIGS = Path(__file__).parents[3] / "configs"


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, *overrides: str) -> str:
    """The one line a file is refused with, without the folder in front."""
    path = write(folder, text)
    with pytest.raises(UserError) as raised:
        load_config(path, overrides)
    message = str(raised.value)
    assert "\n" not in message
    return message.replace(f"{folder}/", "")


def test_load_config_reads_values_over_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "replay:\n  fraction: 0.25\nrun: {seed: 7}\n"))
    assert config.replay.fraction == 0.25
    assert config.run.seed == 7
    assert config.batch.trajectories == 128


def test_load_config_of_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "# nothing\n")) == RunConfig()


def test_load_config_takes_a_section_with_every_key_commented_out(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "replay:\n  # fraction: 0.5\nrun:\n  seed: 3\n")).run.seed == 3


def test_load_config_keeps_the_other_defaults_of_a_section_with_its_own(tmp_path: Path) -> None:
    replay = load_config(write(tmp_path, "loss: {replay: {objective: {name: ppo_clip, clip_low: 0.1}}}")).loss.replay
    assert replay.anchor == "behavior"
    assert replay.objective.model_dump() == {"name": "ppo_clip", "clip_low": 0.1, "clip_high": 0.2, "dual_clip": None}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.5e-3", 1.5e-3),
        ("12:30", "12:30"),
        ("no", "no"),
        ("on", "on"),
        ("'1'", "1"),
        ("2026-01-01", "2026-01-01"),
        ("~", None),
        ("true", True),
        ("-3", -3),
        ("1_000", "1_000"),
    ],
)
def test_scalars_are_read_by_yaml_1_2(tmp_path: Path, text: str, value: object) -> None:
    found = load_config(write(tmp_path, f"environment: {{options: {{x: {text}}}}}")).environment.options["x"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "replay:\n  fraction: 1.5\n",
            "run.yaml:2: replay.fraction must be a number from 0 to 1, got 1.5. "
            "It is: Share of the batch's trajectories drawn from the buffer. Default: 0.0.",
        ),
        (
            "run:\n  seed: 1\nreplay:\n  fracton: 0.2\n",
            "run.yaml:4: replay.fracton must be a known key, got an unknown one. Did you mean replay.fraction?",
        ),
        (
            "loss:\n  fresh:\n    clip_low: 0.1\n",
            "run.yaml:3: loss.fresh.clip_low must be a known key, got an unknown one. Did you mean loss.fresh.anchor?",
        ),
        (
            "\nlearning_rate: 3\n",
            "run.yaml:2: learning_rate must be a known key, got an unknown one. Did you mean optimizer.learning_rate?",
        ),
        ("- 1\n", "run.yaml:1: the file must hold keys and values, got [1]. See configs/reference.yaml."),
        (
            "run:\n  seed: 1\n  seed: 2\n",
            "run.yaml:3: run.seed must be given once, got it on line 2 too. Keep one.",
        ),
        (
            "a: 1\né: &x 1\nb: *x\n",
            "run.yaml:2: the file must not use YAML anchors, aliases or tags, got `&x 1`. Write plain values out.",
        ),
        (
            "a: *x\n",
            "run.yaml:1: the file must not use YAML anchors, aliases or tags, got `*x`. Write plain values out.",
        ),
        (
            "run: {seed: !!str 3}\n",
            "run.yaml:1: the file must not use YAML anchors, aliases or tags, got `!!str 3`. Write plain values out.",
        ),
        (
            "run:\n  seed: ! 3\n",
            "run.yaml:2: the file must not use YAML anchors, aliases or tags, got `! 3`. Write plain values out.",
        ),
        (
            "run: !!python/object/apply:os.system [ls]\n",
            "run.yaml:1: the file must not use YAML anchors, aliases or tags, got `!!python/object/apply:os.system [`. "
            "Write plain values out.",
        ),
        (
            "a: 1\n---\nb: 2\n",
            "run.yaml:2: the file must be valid YAML, got: found another document.",
        ),
        ("? [a]\n: 1\n", "run.yaml:1: the file must have text as keys, got a list or a mapping."),
        (
            "optimizer:\n  learning_rate: .inf\n",
            "run.yaml:2: optimizer.learning_rate must be a finite number, got .inf.",
        ),
        (
            "replay:\n  fraction: 0.1\n  weight: 2\n",
            "run.yaml:3: replay.weight must be 1 when loss.normalise is joint, got 2.0. "
            "Set loss.normalise: per_stream.",
        ),
    ],
)
def test_load_config_refuses_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text) == message


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("batch: {trajectories: true}", "batch.trajectories must be a whole number of at least 1, got true."),
        (
            "batch: {trajectories: '128'}",
            "batch.trajectories must be a whole number of at least 1, got '128'.",
        ),
        (
            "batch: {trajectories: 128.5}",
            "batch.trajectories must be a whole number of at least 1, got 128.5.",
        ),
        ("run: {name: 12}", "run.name must be text matching ^[A-Za-z0-9_.-]{1,64}$, got 12."),
        ("model: {trust_remote_code: yes}", "model.trust_remote_code must be true or false, got 'yes'."),
        ("optimizer: {schedule: step}", "optimizer.schedule must be constant, linear or cosine, got 'step'."),
        (
            "environment: {task_pool: all}",
            "environment.task_pool must be a whole number of at least 1 or unlimited, got 'all'.",
        ),
        (
            "optimizer: {betas: [1, x]}",
            "optimizer.betas must be a list of 2: a number of at least 0 and below 1, a number of at least 0",
        ),
        ("replay: 3", "replay must be a section of keys, got 3."),
        ("run: {<<: {seed: 1}}", "run.<< must be a known key, got an unknown one."),
    ],
)
def test_load_config_refuses_a_wrong_type(tmp_path: Path, text: str, start: str) -> None:
    assert refusal(tmp_path, text).startswith(f"run.yaml:1: {start}")


def test_load_config_counts_the_keys_that_are_wrong(tmp_path: Path) -> None:
    message = refusal(tmp_path, "replay: {fraction: 2, weight: -1}\nrun: {seed: -1}\n")
    assert message.startswith("run.yaml:2: run.seed must be")
    assert message.endswith("(3 keys are wrong; this is the first.)")


def test_load_config_shows_no_control_characters(tmp_path: Path) -> None:
    message = refusal(tmp_path, '"a\\n\\e[31m": 1')
    assert message.startswith(r"run.yaml:1: a\n\x1b[31m must be a known key")


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
def test_load_config_refuses_hostile_yaml_at_once(
    tmp_path: Path, text: str, libyaml: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not libyaml:
        monkeypatch.delattr(yaml, "CBaseLoader")
    importlib.reload(strict_yaml)
    started = time.process_time()
    message = refusal(tmp_path, text)
    assert time.process_time() - started < 1.0
    assert message.startswith("run.yaml:")
    monkeypatch.undo()
    importlib.reload(strict_yaml)


def test_load_config_refuses_a_file_of_100_mb_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    with open(path, "wb") as file:
        file.truncate(100_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="must be at most 1000000 bytes"):
        load_config(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kilobytes


def test_load_config_reads_a_megabyte(tmp_path: Path) -> None:
    text = "environment: {options: {" + ", ".join(f"key{i}: {i}" for i in range(60_000)) + "}}"
    assert 900_000 < len(text) <= 1_000_000
    assert len(load_config(write(tmp_path, text)).environment.options) == 60_000


@pytest.mark.parametrize(
    ("content", "end"),
    [
        (b"a: 1\n\xff", "run.yaml:2: the file must be UTF-8 text, got byte 0xff. Save it as UTF-8."),
        (b"a: \x00", "run.yaml: the file must be readable text, got: control characters are not allowed."),
    ],
)
def test_load_config_refuses_bytes_that_are_no_text(tmp_path: Path, content: bytes, end: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as raised:
        load_config(path)
    assert str(raised.value).endswith(end)


def test_load_config_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        load_config(tmp_path / "none.yaml")
    rule = "the file must be there to read, got: no such file or directory. Check the path; these are built in: clu"
    assert str(raised.value).startswith(f"{tmp_path}/none.yaml: {rule}")
    assert str(raised.value).endswith(", quickstart, reference, strategies, vllm.")


def test_override_wins_over_the_file_and_the_last_one_over_the_first(tmp_path: Path) -> None:
    path = write(tmp_path, "replay: {fraction: 0.1}\nmodel: {path: x}\n")
    overrides = [
        "replay.fraction=0.2",
        "replay.fraction=0.3",
        "model.path=",
        "environment.options.hops=[2, 3]",
        "replay={sampler: uniform}",
    ]
    config = load_config(path, overrides)
    assert config.replay.fraction == 0.3
    assert config.replay.sampler == "uniform"
    assert config.model.path is None
    assert config.environment.options == {"hops": [2, 3]}


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("replay.fraction=1.5", "replay.fraction must be a number from 0 to 1, got 1.5."),
        (
            "replay.fracton=1",
            "replay.fracton must be a known key, got an unknown one. Did you mean replay.fraction?",
        ),
        ("replay.fraction", "an override must be dotted.key=value, got no =."),
        ("=1", "an override must be dotted.key=value, got no key."),
        ("run.seed=*x", "run.seed must not use YAML anchors, aliases or tags, got `*x`. Write plain values out."),
        ("run.seed=[", "run.seed must be valid YAML"),
        ("run.seed.x=1", "run.seed must be a mapping to have keys below it, got 0."),
        ("replay=3", "replay must be a section of keys, got 3."),
    ],
)
def test_override_is_refused_in_the_same_form(tmp_path: Path, override: str, start: str) -> None:
    assert refusal(tmp_path, "run: {seed: 0}", override).startswith(f"override {override}: {start}")


def test_describe_config_is_yaml_that_reads_back_equal(tmp_path: Path) -> None:
    options = 'environment.options={a: [1e-5, "1e-5", null, "yes", "é"], "b c": "x\\x7f\\n", d: {e: true}}'
    config = load_config(CONFIGS / "quickstart.yaml", [options, "optimizer.learning_rate=1e-7"])
    text = describe_config(config)
    assert load_config(write(tmp_path, text)) == config
    assert yaml.safe_load(text) == to_plain(config)  # readers of YAML 1.1 agree
    assert "  fraction: 0.25  # default: 0.0" in text
    assert "  # Share of the batch's trajectories drawn from the buffer. (a number from 0 to 1)" in text


def test_describe_config_names_every_key_with_a_meaning() -> None:
    comments = [line for line in describe_config(RunConfig()).splitlines() if line.strip().startswith("# (")]
    assert comments == []
    assert len(dotted_keys()) > 60


def test_plain_config_survives_json() -> None:
    config = load_config(CONFIGS / "quickstart.yaml")
    assert load_plain(json.loads(json.dumps(to_plain(config)))) == config


def test_load_plain_names_its_source() -> None:
    with pytest.raises(UserError, match=r"^stored configuration: replay\.fraktion must be a known key"):
        load_plain({"replay": {"fraktion": 1}})


def test_reference_file_is_current() -> None:
    current = (CONFIGS / "reference.yaml").read_text(encoding="utf-8")
    assert current == reference_yaml(), "python -m agentloop.config.describe > configs/reference.yaml"


def test_quickstart_file_has_its_published_settings() -> None:
    config = load_config(CONFIGS / "quickstart.yaml")
    assert (config.run.name, config.run.stop_at_success, config.run.iterations) == ("quickstart", 0.95, 60)
    assert [config.mix_rule().fraction_at(iteration) for iteration in (1, 60)] == [0.25, 0.0]
    assert (config.batch.trajectories, config.batch.group_size, config.batch.mini_batch) == (128, 8, 64)
    assert (config.optimizer.learning_rate, config.optimizer.schedule) == (1.5e-3, "cosine")
    assert config.checkpoint.keep_policies == "all"


def test_ppo_file_is_the_quickstarts_task_with_a_critic() -> None:
    config, quickstart = load_config(CONFIGS / "ppo.yaml"), load_config(CONFIGS / "quickstart.yaml")
    assert config.algorithm == "ppo"
    assert (config.environment, config.evaluation) == (quickstart.environment, quickstart.evaluation)
    assert (config.batch.trajectories, config.batch.group_size, config.batch.mini_batch) == (128, 1, 64)
    assert (config.critic.gae_lambda, config.critic.bootstrap_truncated) == (1.0, False)
    assert config.checkpoint.keep_policies == "all"


def test_named_model_has_defaults_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: mine}\nrollout: {max_turns: 5}\n")
    config = load_config(path, ["batch.mini_batch=16"])
    assert (config.optimizer.learning_rate, config.critic.optimizer.learning_rate) == (1e-6, 1e-5)
    assert (config.rollout.max_tokens_per_turn, config.context.max_tokens) == (512, 4096)
    assert (config.rollout.max_turns, config.batch.mini_batch) == (5, 16)
    assert load_plain(to_plain(config)) == config
    assert load_config(write(tmp_path, "rollout: {max_turns: 5}"), ["model.path=mine", "batch.mini_batch=16"]) == config
    # Without a model, and with one that is taken back, those of the built-in one.
    assert load_config(write(tmp_path, "model: {path: mine}"), ["model.path=null"]) == RunConfig()


def test_defaults_that_depend_on_the_model_are_explained_and_shown() -> None:
    both = "# Default: 0.0015; where model.path names a model: 1.0e-06.\n  learning_rate:"
    assert f"{both} 0.0015\n" in describe_config(RunConfig())
    config = load_config(CONFIGS / "model.yaml", ["model.path=mine"])
    assert f"{both} 1.0e-06\n" in describe_config(config)
    assert "# default: 60" not in describe_config(config)


def test_file_for_vllm_needs_the_model_alone() -> None:
    config = load_config(CONFIGS / "vllm.yaml", ["model.path=mine"])
    assert (config.rollout.engine, config.engine.urls) == ("vllm", ("http://127.0.0.1:8000",))


def test_value_that_a_file_leaves_to_the_command_line_must_be_given() -> None:
    with pytest.raises(
        UserError, match=r"model\.yaml:\d+: model\.path must be given, got \?\?\?\. Add --set model.path="
    ):
        load_config(CONFIGS / "model.yaml")


def test_quickstart_is_found_by_its_name_where_no_file_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = load_config(Path("configs/quickstart.yaml"))
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("quickstart")) == own
    assert own.run.name == "quickstart"
    Path("quickstart").write_text("run: {name: mine}")
    assert load_config(Path("quickstart")).run.name == "mine"
