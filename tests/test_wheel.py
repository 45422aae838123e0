"""The wheel has all that the packages read beside their Python files."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("context", "replay", "agentloop")


def test_wheel_has_every_file_of_the_packages(tmp_path: Path) -> None:
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    files = [path.relative_to(ROOT).as_posix() for path in found if path.parent.name != "__pycache__"]
    for name in [*files, "pyproject.toml", "README.md", "LICENSE"]:  # a build leaves things where it is made
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    made = subprocess.run([*command, "--wheel-dir", tmp_path, tmp_path], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    (wheel,) = tmp_path.glob("agentloop_replay-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == set(files)
    assert wheel.stat().st_size < 3e6
