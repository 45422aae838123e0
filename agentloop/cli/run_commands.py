"""`agentloop train | evaluate | sft | export | config | doctor`: the commands for a run and its model."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentloop.cli.options import (
    AsJson,
    ConfigFile,
    EnvironmentChanged,
    Overrides,
    PolicyOption,
    Resume,
    ResumingCommand,
    RunArgument,
    RunPlace,
    program,
    read_resume,
)
from agentloop.distributed.torchrun import own_rank
from agentloop.errors import UserError

if TYPE_CHECKING:
    from agentloop.config import RunConfig
    from agentloop.training.train_result import TrainResult

app = typer.Typer()


@app.command(cls=ResumingCommand, epilog="Example: agentloop train configs/quickstart.yaml --set replay.fraction=0.5")
def train(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG",
            help="YAML file of the run, or a built-in one, as `quickstart`; with --resume also the folder of a run.",
        ),
    ],
    overrides: Overrides = None,
    resume: Resume = None,
    run: RunPlace = None,
    environment_changed: EnvironmentChanged = False,
    as_json: AsJson = False,
) -> None:
    """Train an agent: act, remember, mix, learn."""
    settings = _settings("train", config, overrides or [], resume is not None and run is None)
    # These imports load torch. They come after the configuration, so that a mistake in it is shown at once.
    from agentloop.runs.progress_bars import open_display
    from agentloop.runs.run_folder import refuse_used_folder
    from agentloop.training.train import train as run_training
    from agentloop.training.train import train_worker

    if own_rank():
        train_worker(settings)
        return
    if run is not None:
        refuse_used_folder(run)
    going_on = read_resume(resume, run)
    result = run_training(
        settings,
        resume=going_on,
        run=config if config.is_dir() else run,
        environment_changed=environment_changed,
        display=open_display(stderr=as_json),
    )
    if as_json:
        paths = {name: str(getattr(result, name)) for name in ("folder", "model", "report")}
        print(json.dumps({**vars(result), **paths}))
    else:
        closing_words(result, next_run(config, overrides or [], settings, result))
    raise typer.Exit(result.exit_code)


def _settings(command: str, config: Path, overrides: Sequence[str], resume: bool) -> RunConfig:
    """The configuration in a file; or, to resume a run, the configuration of the run in a folder."""
    from agentloop.config.config_file import load_config
    from agentloop.runs.run_folder import config_to_resume, resumed_run_folder

    if not config.is_dir():
        return load_config(config, overrides)
    if not resume:
        alone = ", and without --run" if command == "train" else ""
        raise UserError(
            f"CONFIG must be a YAML file but with --resume{alone}, got the folder {str(config)!r}. To go on with the "
            f"run in it: {shlex.join([program(), command, str(config), '--resume'])}"
        )
    return resumed_run_folder(config_to_resume(config, overrides), config).config


def next_run(
    config: Path, overrides: Sequence[str], settings: RunConfig, result: TrainResult
) -> tuple[list[str], str] | None:
    """A command to try after this run, with its reason; None after a resume by the run's folder."""
    if config.is_dir():
        return None
    from replay.diagnosis import NO_SIGNAL, TOO_FAST

    other = 0.25 if settings.replay.fraction == 0.5 else 0.5
    command, setting, why = "train", f"replay.fraction={other}", "another mixing ratio"
    if TOO_FAST in result.troubles:
        rate = settings.optimizer.learning_rate / 10
        setting, why = f"optimizer.learning_rate={rate:g}", "success fell: the learning rate is probably too high"
    elif NO_SIGNAL in result.troubles and result.success_after:
        return [program(), "env", "check", str(config)], "all rewards were equal: check them"
    elif result.success_after == 0.0:
        data = settings.sft.data or "DEMONSTRATIONS.jsonl"
        command, setting, why = "sft", f"sft.data={data}", "nothing succeeds yet: train on demonstrations first"
    key = setting.partition("=")[0]
    kept = [given for given in overrides if given.partition("=")[0] != key]
    sets = [word for each in (*kept, setting) for word in ("--set", each)]
    return [program(), command, str(config), *sets], why


def closing_words(result: TrainResult, next_run: tuple[Sequence[str], str] | None) -> None:
    print(f"held-out success: {result.held_out_success}")
    print(f"trained model: {result.model}")
    print(f"run folder: {result.folder}   report: {result.report}")
    replay, folder = shlex.join([program(), "replay"]), shlex.quote(str(result.folder))
    hints = [
        (f"{replay} stats {folder}", "what is in the buffer, and what was drawn from it"),
        (f"{replay} ls {folder} --failed", f"pick one, then: {replay} show ID {folder}"),
    ]
    width = max(len(words) for words, _ in hints)  # the last one can be long
    if next_run is not None and not result.exit_code:
        hints.append((shlex.join(next_run[0]), next_run[1]))
    print("try next:")
    for words, meaning in hints:
        print(f"  {words:<{width}}  # {meaning}")
    print(f"ended after iteration {result.iterations}: {result.why_ended}")


@app.command(
    epilog="Example: agentloop evaluate runs/quickstart-001 --samples 8, or another model on the same tasks: agentloop "
    "evaluate runs/quickstart-001 --url http://127.0.0.1:8000/v1 --model-name NAME --json"
)
def evaluate(
    run: RunArgument = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A run's YAML file: evaluate its model on its held-out tasks.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="With --config: folder or hub id of a model in place of the file's."),
    ] = None,
    overrides: Overrides = None,
    policy: PolicyOption = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Held-out tasks; as configured when left out.")] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Episodes on each task, for pass@k up to that k; as configured when left out."),
    ] = None,
    by: Annotated[
        str | None, typer.Option(metavar="FIELD", help="Field of the tasks' payload: success for each of its values.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Evaluate a served model in the policy's place: a base URL of OpenAI's form."),
    ] = None,
    model_name: Annotated[str | None, typer.Option(metavar="NAME", help="With --url: the model's name there.")] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="With --url: the environment variable with the key.")
    ] = None,
    environment_changed: EnvironmentChanged = False,
    as_json: AsJson = False,
) -> None:
    """Held-out success of a run's policy, or of any model: pass@k, pass^k, turns and stop reasons with intervals."""
    of_run, of_model = run or policy is not None or environment_changed, model is not None or overrides
    of_url = url is not None and model_name is not None and policy is None
    if (of_run and config) or (of_model and not config) or ((url or model_name) and not of_url):
        raise UserError(
            "RUN must be given alone, or --config and perhaps --model and --set, with --url only --model-name and no "
            "--policy, got a mixture. Example: agentloop evaluate --config configs/model.yaml --model PATH"
        )
    from agentloop.analysis import stored_policies
    from agentloop.cli.text_tables import evaluation_table

    key = None if api_key_env is None else os.environ.get(api_key_env)
    served = None if url is None else stored_policies.ServedModel(url, str(model_name), key)
    asked = stored_policies.Asked(tasks, samples, by, served)
    if config is not None:
        sets = [*(overrides or []), *([] if model is None else [f"model.path={json.dumps(model)}"])]
        found = stored_policies.evaluate_model(config, sets, asked)
    else:
        folder = run or stored_policies.newest_trained_folder()
        found = stored_policies.evaluate_run(folder, asked, policy=policy, environment_changed=environment_changed)
    print(json.dumps(found.to_json()) if as_json else evaluation_table(found))


@app.command(
    epilog="Example: agentloop sft configs/model.yaml --set model.path=PATH --set sft.data=demonstrations.jsonl"
)
def sft(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="YAML file of the run; with --resume also the folder of a training."),
    ],
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the training in the folder CONFIG, or the newest of the configuration's name, from its last "
            "checkpoint.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model on demonstrations of your own, to go on from with train."""
    settings = _settings("sft", config, overrides or [], resume)
    from agentloop.runs.progress_bars import open_display
    from agentloop.supervised.sft import sft as train_supervised

    going_on, display = config if config.is_dir() else resume, open_display(stderr=as_json)
    result = train_supervised(settings, resume=going_on, display=display)
    if as_json:
        print(json.dumps({**vars(result), "folder": str(result.folder), "model": str(result.model)}))
    else:
        since = f" -> {result.held_out_after:.4f} after update {result.measured_after}" if result.measured_after else ""
        print(f"held-out loss: {result.held_out_before:.4f}{since or '; it was not measured since (sft.every)'}")
        resumed = shlex.join([program(), "sft", str(result.folder), "--resume"])
        print(f"folder: {result.folder}")
        before = [] if config.is_dir() else [program(), "train", str(config)]
        trained = shlex.join([*before, "--set", f"model.path={result.model}"])
        print(f"go on with: {resumed if result.exit_code else trained}")
        if result.exit_code:
            print(f"or with the weights so far: {trained}")
    raise typer.Exit(result.exit_code)


@app.command(epilog="Example: agentloop export runs/quickstart-001 --to my-agent")
def export(
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="A new folder, or an empty one.")],
    run: RunArgument = None,
    policy: PolicyOption = None,
) -> None:
    """Write a trained policy as a folder that transformers loads, and a hub takes: weights and model card."""
    from agentloop.analysis.exported_model import export_run
    from agentloop.analysis.stored_policies import newest_trained_folder

    print(f"exported to {export_run(run or newest_trained_folder(), to, policy=policy)}")


@app.command(epilog="Example: agentloop config configs/quickstart.yaml --set replay.fraction=0.5")
def config(file: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the effective configuration, each key with its meaning."""
    from agentloop.config.config_file import load_config, to_plain
    from agentloop.config.describe import describe_config

    effective = load_config(file, overrides or [])
    print(json.dumps(to_plain(effective), indent=1) if as_json else describe_config(effective))


@app.command(epilog="Example: agentloop doctor --json")
def doctor(
    folder: Annotated[Path, typer.Option(help="Where runs are to be written.")] = Path("runs"),
    engine: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Also check the vLLM server there, whose key is in AGENTLOOP_ENGINE_KEY."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: optional packages, GPU, sandbox, disk. Exit code 1 if something can't work."""
    from agentloop.analysis.doctor import check_engine, check_machine

    found = check_machine(folder)
    if engine is not None:
        found.append(check_engine(engine, os.environ.get("AGENTLOOP_ENGINE_KEY")))
    if as_json:
        print(json.dumps([check._asdict() for check in found]))
    else:
        for check in found:
            print(f"{check.status:<5} {check.name}: {check.found}" + (f"  -> {check.advice}" if check.advice else ""))
    raise typer.Exit(1 if any(check.status == "fail" for check in found) else 0)
