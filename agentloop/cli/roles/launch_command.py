"""`agentloop launch ROLES`: the roles of a run, started and supervised."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from agentloop.cli.main import NEWEST, Resume, ResumingCommand, RunPlace, check_one_run
from agentloop.errors import UserError
from agentloop.launch.role_commands import chosen_members, load_run_config, role_members
from agentloop.launch.roles_file import load_roles
from agentloop.launch.supervision import launch_here
from agentloop.runs.run_folder import claim_run_folder, run_to_continue

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    cls=ResumingCommand,
    epilog="Example: agentloop launch configs/cluster.yaml, or: agentloop launch configs/cluster.yaml --on ray",
)
def launch(
    file: Annotated[Path, typer.Argument(metavar="ROLES", help="YAML file of the roles: see configs/cluster.yaml.")],
    on: Annotated[Literal["local", "ray"], typer.Option(help="Where they are started.")] = "local",
    run: RunPlace = None,
    resume: Resume = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE", help="Start only this role, or one of it as worker-2; with --run, on local."),
    ] = None,
) -> None:
    """Start the roles of a run: learner, engines, workers, on this machine or on Ray."""
    check_one_run(run, resume)
    if only and (on != "local" or run is None):
        raise UserError(
            f"--only must come with --run and --on local, got --on {on} and "
            f"{'no run' if run is None else run}. The roles of one run need one folder."
        )
    roles = load_roles(file)
    config = load_run_config(roles)
    chosen_members(role_members(roles, config, Path("RUN")), only or ())  # refused before a folder is made
    # All roles are given the run's folder: none has to guess which run is meant.
    found = run or run_to_continue(config, resume="auto" if resume == "auto" else resume == NEWEST)
    place = found or claim_run_folder(config)
    members = chosen_members(role_members(roles, config, place), only or ())
    print(f"run folder: {place}", flush=True)
    if on == "ray":
        from agentloop.launch.ray_cluster import launch_on_ray

        raise typer.Exit(launch_on_ray(members, place, roles.ray))
    raise typer.Exit(launch_here(members, place))
