"""Coding programs of others, where they are installed, mend a file: one sequence of exact tokens."""

import json
import shutil
from collections.abc import Mapping

import pytest

from examples.coding_clis.solve import COMMANDS
from tests.agentloop.rollouts.test_agent_episodes import play
from tests.fakes.runs import ROOT
from tests.fakes.scripted import call

pytestmark = pytest.mark.slow

ROW = {
    "prompt": "Mend sum.py: add must add.",
    "files": {"sum.py": "def add(a, b):\n    return a - b\n"},
    "check": "from sum import add\nassert add(1, 2) == 3",
}
_MEND = "sed -i 's/a - b/a + b/' sum.py"


def _called(name: str, **arguments: object) -> str:
    return call(name, json.dumps(arguments))


MENDS: Mapping[str, str] = {
    "aider": "sum.py\n```\n<<<<<<< SEARCH\n    return a - b\n=======\n    return a + b\n>>>>>>> REPLACE\n```\n",
    "claude": _called("Bash", command=_MEND, description="Mend"),
    "codex": _called("exec_command", cmd=_MEND),
    "mini": _called("bash", command=_MEND),
    "opencode": _called("bash", command=_MEND, description="Mend"),
    "qwen": _called("run_shell_command", command=_MEND, is_background=False),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_installed_coding_program_mends_a_file(name: str) -> None:
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")

    def says(prompt: str) -> str:
        if "<tool_response>" not in prompt[prompt.rindex("<|im_start|>user") :]:
            return MENDS[name]
        ends = _called("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
        return ends if name == "mini" else "Mended."

    sizes = {"max_tokens": 200_000}
    agent = f"/usr/bin/python3 {ROOT / 'examples/coding_clis/solve.py'} {name} {program}"
    (episode,), _ = play(agent, says, row=ROW, context=sizes, max_tokens_per_turn=4000)
    assert (episode.stop_reason, episode.environment_reward) == ("answered", 1.0)
    assert len(episode.segments) == 1
