"""What an engine must hold: the test server that stands for vLLM here; soak tests ask a real one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from agentloop.engines import Completion, GenerationFailed, GenerationRequest
from agentloop.engines.publish.engine_control import EngineControl
from agentloop.engines.remote.engine_client import EngineLimits, RemoteEngine
from agentloop.engines.remote.server_facts import ServerFacts, ask_server
from tests.fakes.engine_sampling import load, plain_log_probs, plain_scores, replies_of, save_adapter
from tests.fakes.engine_server import EngineServer, serving

KEY = "a-key-that-nobody-sees"
VERSION = 3
IMPATIENT = EngineLimits(first_pause_s=0.01, proof_timeout_s=0.1, restart_timeout_s=0.0)


@dataclass(frozen=True)
class Subject:
    """An engine, and the model that it must agree with."""

    facts: ServerFacts
    model: PreTrainedModel

    @property
    def stop_ids(self) -> frozenset[int]:
        """The model's own, at which vLLM stops whatever it is asked."""
        listed = self.model.generation_config.eos_token_id
        return frozenset(listed if isinstance(listed, list) else [] if listed is None else [listed])

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.vocab_size)

    def engine(
        self, *, stop_ids: frozenset[int] = frozenset(), version: int = VERSION, temperature: float = 1.0
    ) -> RemoteEngine:
        ids, size = self.stop_ids | stop_ids, self.vocabulary
        engine = RemoteEngine([self.facts], key=KEY, stop_ids=ids, vocab_size=size, limits=IMPATIENT)
        engine.published(version)
        engine.begin(seed=0, temperature=temperature)
        return engine

    def assert_own(self, request: GenerationRequest, reply: Completion, temperature: float = 1.0) -> None:
        own = plain_log_probs(self.model, request.prompt_ids, reply.token_ids, temperature)
        assert reply.log_probs == pytest.approx(own, abs=1e-3)

    def prompt(self, number: int, length: int = 12) -> list[int]:
        return [(7 * number + 5 * place + 1) % self.vocabulary for place in range(length)]

    def replies(self, *requests: GenerationRequest, temperature: float = 1.0) -> list[Completion]:
        return [recorded(reply) for reply in replies_of(self.engine(temperature=temperature), requests)]


def recorded(reply: Completion | GenerationFailed) -> Completion:
    assert isinstance(reply, Completion), reply
    return reply


@pytest.fixture(scope="module")
def server(qwen2: Path) -> Iterator[EngineServer]:
    with serving(qwen2, key=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def subject(server: EngineServer) -> Subject:
    facts = ask_server(server.address, key=KEY)
    server.models.label = str(VERSION)
    return Subject(facts, server.models.model)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_models_own_at_the_temperature_of_the_sampling(subject: Subject, temperature: float) -> None:
    requests = [GenerationRequest(n, subject.prompt(n, 4 + n), 24) for n in range(8)]
    for _ in range(2):  # turns of the same episodes
        replies = subject.replies(*requests, temperature=temperature)
        for request, reply in zip(requests, replies, strict=True):
            subject.assert_own(request, reply, temperature)
            ended = reply.token_ids[-1] in subject.stop_ids
            assert len(reply.token_ids) == 24 or (ended and len(reply.token_ids) < 24)
            assert reply.policy_version == VERSION
        turns = zip(requests, replies, strict=True)
        requests = [replace(one, prompt_ids=[*one.prompt_ids, *reply.token_ids, 1]) for one, reply in turns]


def test_a_greedy_reply_is_the_most_likely_one_and_ends_with_its_stop_token(subject: Subject) -> None:
    request = GenerationRequest(0, subject.prompt(1), 12)
    first, second = (subject.replies(request, temperature=0.0)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    subject.assert_own(request, first)  # log-probs of temperature 1
    scores = plain_scores(subject.model, [*request.prompt_ids, *first.token_ids]).max(-1).values
    assert first.log_probs == pytest.approx(scores[len(request.prompt_ids) - 1 : -1].tolist(), abs=1e-3)
    stop = first.token_ids[len(first.token_ids) // 2]
    (reply,) = replies_of(subject.engine(stop_ids=frozenset({stop}), temperature=0.0), [request])
    assert recorded(reply).token_ids == first.token_ids[: first.token_ids.index(stop) + 1]


def test_a_prompt_is_read_token_for_token(subject: Subject) -> None:
    prompt = [subject.vocabulary - 1, 0, 0, 1, *sorted(subject.stop_ids)[:3], 5]
    request = GenerationRequest(0, prompt, 8)
    subject.assert_own(request, *subject.replies(request))


def test_a_version_that_was_not_proved_is_refused(subject: Subject) -> None:
    engine = subject.engine(version=VERSION + 1)
    (reply,) = replies_of(engine, [GenerationRequest(0, subject.prompt(0), 4)])
    said = f"unproved_version: tokens of weights '{VERSION}', for which the engine has not been proved"
    assert (str(reply), engine.faults) == (said, {"unproved_version": 3})


def test_a_prompt_that_is_too_long_or_none_of_the_models_is_refused(subject: Subject) -> None:
    longest = subject.facts.max_model_len
    assert longest is not None
    engine, wrong = subject.engine(), [[1, subject.vocabulary + 100_000], subject.prompt(0, longest + 1)]
    outside, long = (str(reply) for reply in replies_of(engine, [GenerationRequest(0, ids, 4) for ids in wrong]))
    assert outside.startswith("refused: status 400: ") and long.startswith("refused: status 400: ")
    assert f" {longest}" in long and engine.faults == {"refused": 2}
    request = GenerationRequest(0, subject.prompt(0, longest - 3), 3)
    assert len(subject.replies(request)[0].token_ids) <= 3


def test_an_adapter_samples_under_its_own_name(subject: Subject, tmp_path: Path) -> None:
    name, folder = "run@4", save_adapter(Path(subject.model.name_or_path), tmp_path)
    adapted = load(subject.model.name_or_path)
    adapted.load_adapter(str(folder))
    with EngineControl(subject.facts.url, model=subject.facts.model, key=KEY) as control:
        control.load_adapter(name, folder)
        engine = subject.engine()
        engine.published(VERSION + 1, name)
        request = GenerationRequest(0, subject.prompt(5), 16)
        reply = recorded(replies_of(engine, [request])[0])
        control.unload_adapter(name)
    replace(subject, model=adapted.eval()).assert_own(request, reply)
    below = plain_log_probs(subject.model, request.prompt_ids, reply.token_ids)
    assert reply.log_probs != pytest.approx(below, abs=0.01)
    assert reply.policy_version == VERSION + 1
    assert str(replies_of(engine, [request])[0]) == f"unproved_version: the engine has no '{name}': has it restarted?"
