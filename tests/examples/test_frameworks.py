"""Agent frameworks ask unchanged, and are answered, where AGENTLOOP_FRAMEWORKS names a Python that has them."""

import os

import pytest

from examples.gateway_agents.frameworks import FRAMEWORKS
from tests.agentloop.rollouts.test_agent_episodes import play
from tests.fakes.runs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROW = {"prompt": 'What is the code of "pearl"?', "system": "Look up keys.", "store": {}, "answer": "78"}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_framework_is_answered_and_its_replies_are_trained(name: str) -> None:
    python = os.environ.get("AGENTLOOP_FRAMEWORKS")
    if python is None:
        pytest.skip("AGENTLOOP_FRAMEWORKS names no Python that has the frameworks")
    agent = f"{python} {ROOT / 'examples/gateway_agents/frameworks.py'} {name}"
    (episode,), _ = play(agent, lambda _: "It is 78.", row=ROW, context={"max_tokens": 200_000})
    assert (episode.stop_reason, {str(node.status) for node in episode.nodes}) == ("answered", {"trained"})
