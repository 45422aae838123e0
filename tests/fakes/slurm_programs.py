"""`sbatch` and `scontrol` for this machine: a job is run here, and again when it asks.

`install` writes both into a folder for the PATH. sbatch runs the script at once and prints what it does.
"""

from __future__ import annotations

import sys
from pathlib import Path

SBATCH = """\
#!{python}
import os, pathlib, signal, subprocess, sys, time
place = pathlib.Path(__file__).parent
script = sys.argv[-1]
again = place / "requeued"
for start in range({limits} + 1):
    again.unlink(missing_ok=True)
    with open(place / "job.out", "ab") as output:
        job = subprocess.Popen(["bash", script], stdout=output, stderr=output, start_new_session=True,
                               env={{**os.environ, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(start)}})
    while start < {limits} and job.poll() is None:
        time.sleep(0.05)
        if (place / f"limit-{{start}}").exists():
            os.kill(job.pid, signal.SIGTERM)  # B: the batch shell alone
            break
    code = job.wait()
    with open(place / "codes", "a") as file:
        file.write(f"{{code}}\\n")
    if not again.exists():
        break
print("Submitted batch job 7")
"""
SCONTROL = """\
#!{python}
import pathlib, sys
assert sys.argv[1:] == ["requeue", "7"], sys.argv
(pathlib.Path(__file__).parent / "requeued").touch()
"""


def install(folder: Path, *, limits: int) -> Path:
    """The folder for the PATH. A file `limit-N` in it says that the time of the job's start N is up; its output is
    in `job.out`, and the exit code of each start a line of `codes`."""
    folder.mkdir()
    for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL)):
        (folder / name).write_text(text.format(python=sys.executable, limits=limits))
        (folder / name).chmod(0o755)
    return folder
