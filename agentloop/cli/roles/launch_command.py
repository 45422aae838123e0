"""`agentloop launch ROLES`: the roles of a run, started and supervised."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from agentloop.cli.main import NEWEST, Resume, ResumingCommand, RunPlace, check_one_run
from agentloop.config import RunConfig
from agentloop.errors import UserError
from agentloop.launch.role_commands import chosen_members, load_run_config, role_members
from agentloop.launch.roles_file import load_roles
from agentloop.runs.run_folder import LOGS, claim_run_folder, next_run_folder, run_to_continue

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    cls=ResumingCommand,
    epilog="Example: agentloop launch configs/cluster.yaml, or: agentloop launch configs/cluster.yaml --on slurm",
)
def launch(
    file: Annotated[Path, typer.Argument(metavar="ROLES", help="YAML file of the roles: see configs/cluster.yaml.")],
    on: Annotated[Literal["local", "ray", "slurm"], typer.Option(help="Where they are started.")] = "local",
    run: RunPlace = None,
    resume: Resume = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE", help="Start only this role, or one of it as worker-2; with --run, on local."),
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the Slurm script goes.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the Slurm script; submit nothing.")] = False,
) -> None:
    """Start the roles of a run: learner, engines, workers, on this machine, on Ray or under Slurm."""
    _check_options(on, run, only, resume, slurm_only=dry_run or output is not None)
    roles = load_roles(file)
    config = load_run_config(roles)
    members = role_members(roles, config, Path("RUN"))  # refused before a folder is made
    chosen_members(members, only or ())
    place = _place(config, run, resume, make=not dry_run)
    members = chosen_members(role_members(roles, config, place), only or ())
    if on == "slurm":
        from agentloop.launch.slurm_job import slurm_script, submit

        script = slurm_script(file, members, place, roles.slurm.options)
        if dry_run:
            print(script, end="")
            return
        raise typer.Exit(submit(script, output or place / LOGS / "slurm.sh"))
    print(f"run folder: {place}", flush=True)
    if on == "ray":
        from agentloop.launch.ray_cluster import launch_on_ray

        raise typer.Exit(launch_on_ray(members, place, roles.ray))
    from agentloop.launch.local_machine import launch_here

    raise typer.Exit(launch_here(members, place))


def _check_options(on: str, run: Path | None, only: list[str] | None, resume: str | None, *, slurm_only: bool) -> None:
    check_one_run(run, resume)
    if only and (on != "local" or run is None):
        raise UserError(
            f"--only must come with --run and --on local, got --on {on} and "
            f"{'no run' if run is None else run}. The roles of one run need one folder."
        )
    if slurm_only and on != "slurm":
        raise UserError(f"--output and --dry-run must come with --on slurm, got --on {on}. Leave them out.")


def _place(config: RunConfig, run: Path | None, resume: str | None, *, make: bool) -> Path:
    """The folder of the run, which all roles are given: none has to guess which run is meant."""
    found = run or run_to_continue(config, resume="auto" if resume == "auto" else resume == NEWEST)
    return found or (claim_run_folder(config) if make else next_run_folder(config))
