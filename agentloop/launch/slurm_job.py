"""`--on slurm`: the roles as one job that puts itself back into the queue until the run has ended."""

from __future__ import annotations

import math
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentloop.errors import UserError, shortened
from agentloop.launch.role_commands import RoleMember

_SPARE_S = 30
"""Seconds of the job in which nothing but its way back into the queue is left."""


def slurm_script(file: Path, members: Sequence[RoleMember], run: Path, options: Sequence[str]) -> str:
    """A script for sbatch: a node with room for all roles, on which `agentloop launch` supervises them.

    Before its time is up the job gets SIGTERM: the learner finishes its iteration and saves, and the job is queued
    again. It then goes on with the same run, by its folder. `options`: of the user, after ours.
    """
    words = [sys.executable, "-m", "agentloop", "launch", str(file.absolute()), "--run", str(run.absolute())]
    body = _BODY.format(folder=shlex.quote(str(Path.cwd())), launch=shlex.join(words))
    return "\n".join(["#!/bin/bash", *_options(members, run, options), body])


def submit(script: str, target: Path) -> int:
    """Write the script and give it to sbatch. Raises UserError where sbatch is missing or refuses."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(script)
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise UserError(f"--on slurm must find sbatch on the PATH, got none. Where there is one: sbatch {target}")
    done = subprocess.run([sbatch, str(target)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"sbatch must accept {target}, got: {shortened(done.stderr)}. Mend slurm.options.")
    print(f"{done.stdout.strip()} ({target})")
    return 0


def _options(members: Sequence[RoleMember], run: Path, options: Sequence[str]) -> Iterator[str]:
    slowest = [max((m.needs.stop_s for m in members if m.leads is leads), default=0.0) for leads in (True, False)]
    gpus = sum(member.needs.gpus for member in members)
    ours = [
        f"--job-name={run.name}",
        "--nodes=1",  # engines listen on their own machine only
        "--ntasks=1",
        f"--cpus-per-task={sum(member.needs.cpus for member in members)}",
        *([f"--gres=gpu:{gpus}"] if gpus else []),
        "--requeue",
        "--open-mode=append",
        f"--signal=B:TERM@{math.ceil(sum(slowest)) + _SPARE_S}",
    ]
    for option in (*ours, *options):
        if len(option.splitlines()) != 1:
            raise UserError(f"slurm.options must each be one line, got {option!r}. Split it.")
        yield f"#SBATCH {option}"


_BODY = """
cd {folder} || exit 2
asked= launch=
trap 'asked=yes; [ -z "$launch" ] || kill -TERM "$launch"' TERM
{launch} &
launch=$!
[ -z "$asked" ] || kill -TERM "$launch"
wait "$launch"; code=$?
# The signal ends the first wait, not the launch.
while kill -0 "$launch" 2>/dev/null; do wait "$launch"; code=$?; done
if [ -n "$asked" ] && [ "$code" -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""
