"""The control of a server: what is asked of it in which order, and what its refusals say to a person."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentloop.engines.publish.engine_control import EngineControl, EngineRefused, Scored
from tests.fakes.scripted_http import ScriptedServer, scripted_server

KEY = "the-secret"
GENERATE = "/inference/v1/generate"
ROW = [None, {"4": {"logprob": -2.5, "rank": 9, "decoded_token": None}}]
TOP = [{"token_id": 5, "logprob": -1.5, "rank": 2}, {"token_id": 7, "logprob": -0.5, "rank": 1}]
TOKEN = {"token_id": 5, "logprob": -1.5, "top_logprobs": TOP}
SPAN = {"version": "run@3", "start": 0, "end": 1}
CHOICE = {"logprobs": {"content": [TOKEN]}, "weight_versions": [SPAN]}
GENERATED = {"model": "tiny", "choices": [CHOICE], "prompt_logprobs": ROW}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


@pytest.fixture
def control(server: ScriptedServer) -> Iterator[EngineControl]:
    with EngineControl(server.url, model="tiny", key=KEY, timeout_s=20) as control:
        yield control


def test_reload_names_weights_or_leaves_paused(server: ScriptedServer, control: EngineControl, tmp_path: Path) -> None:
    for path in ("/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"):
        server.answers[path] = (200, {})
    control.reload(tmp_path, "run@3")
    steps = [
        ("/pause?mode=keep", None),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}),
        ("/reset_prefix_cache?reset_running_requests=true", None),
        ("/update_weight_version", {"new_version": "run@3"}),
        ("/resume", None),
    ]
    assert (server.asked, server.keys) == (steps, {f"Bearer {KEY}"})
    server.answers["/collective_rpc"] = (500, {"error": "no such repo"})
    with pytest.raises(EngineRefused, match="got status 500.*no such repo.* its weights are gone") as said:
        control.reload(tmp_path, "run@4")
    assert server.paths()[5:] == ["/pause?mode=keep", "/collective_rpc"]
    assert said.value.status == 500 and KEY not in str(said.value)


REFUSALS: list[tuple[dict[str, Any], Callable[[EngineControl], object], str]] = [
    ({}, lambda c: c.label(), "Start it with VLLM_SERVER_DEV_MODE=1"),
    ({}, lambda c: c.number_type(), "Start it with VLLM_SERVER_DEV_MODE=1"),
    ({}, lambda c: c.load_adapter("a", Path()), "Start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    (
        {GENERATE: (403, {})},
        lambda c: c.score_tokens([3], temperature=1.0, model="a"),
        "Start it with --enable-scale-out",
    ),
    ({"/v1/models": (401, {})}, lambda c: c.adapters(), "Give this side the --api-key that it was started with"),
    (
        {GENERATE: (200, {"model": "tiny", "choices": []})},
        lambda c: c.score_tokens([3], temperature=1.0, model="tiny"),
        f"must answer {GENERATE} as vLLM does, got not what the route answers with: ValueError",
    ),
    (
        {GENERATE: (200, {"model": "tiny", "choices": [{"weight_versions": [SPAN]}], "prompt_logprobs": ROW})},
        lambda c: c.score_tokens([3, 4], temperature=1.0, model="tiny"),
        f"must answer {GENERATE} as vLLM does, got no log-probs in its answer",
    ),
    (
        {GENERATE: (200, {**GENERATED, "prompt_logprobs": [None, None]})},
        lambda c: c.score_tokens([3, 4], temperature=1.0, model="tiny"),
        f"must answer {GENERATE} as vLLM does, got ",
    ),
]


@pytest.mark.parametrize(("answers", "asked", "said"), REFUSALS, ids=[said for *_, said in REFUSALS])
def test_a_refusal_says_what_to_do(
    server: ScriptedServer, control: EngineControl, answers: Any, asked: Callable[[EngineControl], object], said: str
) -> None:
    server.answers = answers
    with pytest.raises(EngineRefused, match=said):
        asked(control)


def test_a_row_is_scored_as_in_a_rollout(server: ScriptedServer, control: EngineControl) -> None:
    server.answers[GENERATE] = (200, GENERATED)
    found = control.score_tokens([3, 4], temperature=0.7, model="tiny")
    assert found == Scored((-2.5,), {5: -1.5, 7: -0.5}, "tiny", "run@3")
    (_, body) = server.asked[0]
    assert body["token_ids"] == [3, 4]
    assert body["sampling_params"]["temperature"] == 0.7 and body["sampling_params"]["top_p"] == 1.0


def test_an_engine_is_healthy_if_its_server_says_so_and_it_does_not_stand_still(
    server: ScriptedServer, control: EngineControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentloop.engines.publish.engine_control._HEALTH_S", 0.5)
    found = []
    for status in (503, 200):
        server.answers["/health"] = (status, None)
        found.append(control.healthy())
    server.silent.add("/is_paused")
    with EngineControl("http://127.0.0.1:9", model="tiny") as nobody:
        assert [*found, control.healthy(), nobody.healthy()] == [False, True, False, False]
