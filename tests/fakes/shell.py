"""Commands as people type them, at the real entry point but without a new process."""

import sys
from pathlib import Path

import pytest

from agentloop.cli.main import main


class Shell:
    """Types commands in one folder, at the real entry point but without a new process."""

    def __init__(self, patch: pytest.MonkeyPatch, captured: pytest.CaptureFixture[str]) -> None:
        self._patch = patch
        self._captured = captured

    def type(self, words: list[str | Path], folder: Path) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        self._patch.chdir(folder)
        self._patch.setattr(sys, "argv", ["agentloop", *map(str, words)])
        self._captured.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        if ended.value.code == 1 and isinstance(ended.value.__cause__, Exception):
            raise ended.value.__cause__  # a mistake of the program's own, with its traceback
        output, errors = self._captured.readouterr()
        assert ended.value.code is None or isinstance(ended.value.code, int)
        return ended.value.code or 0, output, errors

    def refusal(self, words: list[str | Path], folder: Path) -> str:
        """The one line of a mistake that the user can mend."""
        code, output, errors = self.type(words, folder)
        assert (code, output) == (2, "")
        (line,) = errors.splitlines()
        assert line.startswith("agentloop: ")
        return line.removeprefix("agentloop: ")
