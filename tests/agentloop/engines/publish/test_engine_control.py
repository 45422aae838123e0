"""The control of a server: what is asked of it in which order, and what its refusals say to a person."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentloop.engines.publish.engine_control import EngineControl, EngineRefused, Scored
from tests.fakes.scripted_http import ScriptedServer, scripted_server

KEY = "the-secret"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


@pytest.fixture
def control(server: ScriptedServer) -> Iterator[EngineControl]:
    with EngineControl(server.url, model="tiny", key=KEY, timeout_s=20) as control:
        yield control


def test_reload_pauses_and_names_the_weights(server: ScriptedServer, control: EngineControl, tmp_path: Path) -> None:
    for path in ("/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"):
        server.answers[path] = (200, {})
    control.reload(tmp_path, "run@3")
    assert server.asked == [
        ("/pause?mode=keep", None),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}),
        ("/reset_prefix_cache?reset_running_requests=true", None),
        ("/update_weight_version", {"new_version": "run@3"}),
        ("/resume", None),
    ]
    assert server.keys == {f"Bearer {KEY}"}


def test_failed_reload_leaves_it_paused(server: ScriptedServer, control: EngineControl, tmp_path: Path) -> None:
    server.answers = {"/pause": (200, {}), "/collective_rpc": (500, {"error": "no such repo"})}
    with pytest.raises(EngineRefused, match="got status 500.*no such repo.* its weights are gone") as said:
        control.reload(tmp_path, "run@3")
    assert server.paths() == ["/pause?mode=keep", "/collective_rpc"]
    assert said.value.status == 500 and KEY not in str(said.value)


def test_closed_routes_say_how_to_open_them(control: EngineControl, tmp_path: Path) -> None:
    with pytest.raises(EngineRefused, match="Start it with VLLM_SERVER_DEV_MODE=1"):
        control.label()
    with pytest.raises(EngineRefused, match="Start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        control.load_adapter("run@1", tmp_path)


def test_wrong_key_says_what_to_give(server: ScriptedServer, control: EngineControl) -> None:
    server.answers["/v1/models"] = (401, {"error": "Unauthorized"})
    with pytest.raises(EngineRefused, match="Give this side the --api-key that it was started with"):
        control.adapters()


def test_adapters_are_the_models_with_a_parent(server: ScriptedServer, control: EngineControl) -> None:
    cards = [{"id": "tiny", "parent": None}, {"id": "run@1", "parent": "tiny"}, {"id": "run@2", "parent": "tiny"}]
    server.answers["/v1/models"] = (200, {"data": cards})
    assert control.adapters() == ["run@1", "run@2"]


ROW_ANSWER = [None, {"4": {"logprob": -2.5, "rank": 9, "decoded_token": None}}]


def test_a_row_is_scored_by_generate(server: ScriptedServer, control: EngineControl) -> None:
    top = [{"token_id": 5, "logprob": -1.5, "rank": 2}, {"token_id": 7, "logprob": -0.5, "rank": 1}]
    token = {"token_id": 5, "logprob": -1.5, "top_logprobs": top}
    choice = {"logprobs": {"content": [token]}, "weight_versions": [{"version": "run@3", "start": 0, "end": 1}]}
    answer = {"model": "tiny", "choices": [choice], "prompt_logprobs": ROW_ANSWER}
    server.answers["/inference/v1/generate"] = (200, answer)
    found = control.scored([3, 4], temperature=0.7, model="tiny")
    assert found == Scored((-2.5,), {5: -1.5, 7: -0.5}, "tiny", "run@3")
    (_, body) = server.asked[0]
    assert body["token_ids"] == [3, 4]
    assert body["sampling_params"]["temperature"] == 0.7 and body["sampling_params"]["top_p"] == 1.0


def test_a_row_is_scored_by_completions_where_generate_is_closed(
    server: ScriptedServer, control: EngineControl
) -> None:
    server.answers["/inference/v1/generate"] = (403, {"error": "disabled"})
    choice = {"logprobs": {"top_logprobs": [{"token_id:5": -1.5, "token_id:7": -0.5}]}, "prompt_logprobs": ROW_ANSWER}
    server.answers["/v1/completions"] = (200, {"model": "tiny", "choices": [choice]})
    for _ in range(2):
        found = control.scored([3, 4], temperature=0.7, model="tiny")
        assert found == Scored((-2.5,), {5: -1.5, 7: -0.5}, "tiny", None)
    assert server.paths() == ["/inference/v1/generate", "/v1/completions", "/v1/completions"]


def test_an_engine_says_in_what_it_multiplies(server: ScriptedServer, control: EngineControl) -> None:
    server.answers["/server_info"] = (200, {"vllm_config": {"model_config": {"dtype": "torch.bfloat16"}}})
    assert control.number_type() == "bfloat16"
    server.answers["/server_info"] = (404, None)
    with pytest.raises(EngineRefused, match="Start it with VLLM_SERVER_DEV_MODE=1"):
        control.number_type()


def test_answer_of_another_form_is_refused(server: ScriptedServer, control: EngineControl) -> None:
    server.answers["/inference/v1/generate"] = (200, {"model": "tiny", "choices": []})
    with pytest.raises(EngineRefused, match="must answer /inference/v1/generate as vLLM does"):
        control.scored([3], temperature=1.0, model="tiny")


def test_answer_without_log_probs_is_refused(server: ScriptedServer, control: EngineControl) -> None:
    server.answers["/inference/v1/generate"] = (403, None)
    choice = {"logprobs": {"top_logprobs": [{}]}, "prompt_logprobs": [None]}
    server.answers["/v1/completions"] = (200, {"model": "tiny", "choices": [choice]})
    with pytest.raises(EngineRefused, match="got ValueError: no log-probs in its answer"):
        control.scored([3], temperature=1.0, model="tiny")


def test_tokenizer_that_is_not_there_is_none(server: ScriptedServer, control: EngineControl) -> None:
    assert control.tokenize("text") is None
    server.answers["/tokenize"] = (200, {"tokens": [1, 2]})
    assert control.tokenize("text") == [1, 2]


def test_health_is_whether_it_answers_so(server: ScriptedServer, control: EngineControl) -> None:
    server.answers["/health"] = (503, None)
    assert not control.healthy()
    server.answers["/health"] = (200, None)
    assert control.healthy()
    with EngineControl("http://127.0.0.1:9", model="tiny") as nobody:
        assert not nobody.healthy()


def test_engine_that_stands_still_is_not_healthy(server: ScriptedServer, control: EngineControl) -> None:
    server.answers["/health"] = (200, None)
    server.silent.add("/is_paused")
    assert not control.healthy()
