"""Answers of vLLM: what a right one says, and what is never recorded of a wrong one."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest

from agentloop.engines import Completion, GenerationFailed, GenerationRequest
from agentloop.engines.generator import recordable
from agentloop.engines.remote.serving_urls import Weights
from agentloop.engines.remote.vllm_protocol import EngineFault, check_reply, generate_body, read_reply

REQUEST = GenerationRequest(0, [1, 2], 3)
SCORED = {5: -1.0, 6: -0.5, 7: -2.0}
CHOICE: dict[str, Any] = {"token_ids": [*SCORED], "finish_reason": "length"}
SPANS = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 3}]
LOG_PROBS = {"content": [{"token_id": token, "logprob": value} for token, value in SCORED.items()]}
LOG_PROB, SCORED_ID = (("logprobs", "content", 1, name) for name in ("logprob", "token_id"))
TOKEN = ("token_ids", 1)


def checked(
    changes: dict[Any, Any], *, weights: Weights | None = None, request: GenerationRequest = REQUEST
) -> Completion:
    """The completion of an answer whose choice, or whole, is changed at some paths."""
    choice = {**CHOICE, "logprobs": LOG_PROBS, "weight_versions": SPANS}
    answer = copy.deepcopy({"model": "tiny", "usage": {"prompt_tokens": 2}, "choices": [choice]})
    for path, value in changes.items():
        place: Any = answer if path[0] in answer else answer["choices"][0]  # type: ignore[index]
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
    return check_reply(
        read_reply(answer),
        request,
        stop_ids=frozenset({9}),
        vocab_size=20,
        weights=weights or Weights(4),
        versions={"a": 3, "b": 4},
    )


def test_a_right_reply_has_the_version_of_each_token_or_that_of_its_adapter() -> None:
    expected = Completion((5, 6, 7), (-1.0, -0.5, -2.0), (3, 4, 4))
    assert checked({}) == expected
    assert checked({("weight_versions", 1, "version"): "a"}) == replace(expected, policy_version=3)
    adapter = Weights(8, "run@8")
    assert checked({("model",): "run@8"}, weights=adapter) == replace(expected, policy_version=8)
    ended = {("finish_reason",): "stop", ("token_ids", 2): 9, ("logprobs", "content", 2, "token_id"): 9}
    assert checked(ended, request=replace(REQUEST, max_new_tokens=10)).token_ids == (5, 6, 9)


def test_reply_may_stop_at_a_text_that_its_request_names() -> None:
    request = replace(REQUEST, max_new_tokens=10, stop=("END",))
    assert checked({("finish_reason",): "stop"}, request=request).token_ids == (5, 6, 7)
    body = generate_body("tiny", [1], temperature=1.0, max_new_tokens=3, stop=request.stop)["sampling_params"]
    assert (body["stop"], body["detokenize"], body["skip_special_tokens"]) == (["END"], True, False)


WRONG = [
    ({("usage", "prompt_tokens"): 3}, "3 tokens read of a prompt of 2"),
    ({("usage",): None}, "None tokens read of a prompt of 2"),
    ({("logprobs",): None}, "0 log-probs for 3 tokens"),
    ({LOG_PROB: None}, "a log-prob of None, which stands for none"),
    ({LOG_PROB: -9999.0}, "a log-prob of -9999.0, which stands for none"),
    ({LOG_PROB: math.nan}, "log-probs with nan among them"),
    ({LOG_PROB: 0.25}, "a log-prob of 0.25, which is above 0"),
    ({SCORED_ID: 8}, "log-probs of other tokens than those of the reply"),
    ({SCORED_ID: 20, TOKEN: 20}, "token 20 of a vocabulary of 20"),
    ({SCORED_ID: 9, TOKEN: 9}, "1 tokens after the stop token 9"),
    ({TOKEN: "6"}, "not what the route answers with: TypeError"),
    ({("choices",): []}, "not what the route answers with: ValueError"),
    ({("finish_reason",): "stop"}, "a reply that stopped at token 7, which is no stop token of the policy"),
    ({("finish_reason",): "error"}, "a reply that ended by 'error'"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_reply_that_is_wrong_is_never_recorded(changes: dict[Any, Any], said: str) -> None:
    with pytest.raises(EngineFault) as fault:
        checked(changes)
    assert (fault.value.kind, str(fault.value)[: len(said)]) == ("wrong_reply", said)


NOT_COVERED = [([(0, 1), (2, 3)], "0 to 1, 2 to 3"), ([(0, 2), (1, 3)], "0 to 2, 1 to 3"), ([(0, 2)], "0 to 2")]
NOT_COVERED += [([(0, 0), (0, 3)], "0 to 0, 0 to 3"), ([], "none")]


@pytest.mark.parametrize(("spans", "said"), NOT_COVERED)
def test_each_token_must_be_in_one_span(spans: list[tuple[int, int]], said: str) -> None:
    given = [{"version": "a", "start": start, "end": end} for start, end in spans]
    with pytest.raises(EngineFault, match=f"^spans of weights that do not cover its 3 tokens once: {said}$"):
        checked({("weight_versions",): given or None})


UNPROVED = "tokens of weights 'default', for which the engine has not been proved"
OTHERS: list[tuple[dict[Any, Any], Weights, int, str, str]] = [
    ({("finish_reason",): "abort"}, Weights(4), 3, "aborted", "the server gave the reply up"),
    ({}, Weights(4), 2, "wrong_reply", "3 tokens where 1 to 2 were asked for"),
    ({}, Weights(4), 6, "wrong_reply", "a reply of 3 tokens that is cut where 6 were asked for"),
    ({}, Weights(8, "run@8"), 3, "wrong_reply", "a reply of 'tiny', asked of 'run@8'"),
    ({("weight_versions", 1, "version"): "default"}, Weights(4), 3, "unproved_version", UNPROVED),
]


@pytest.mark.parametrize(("changes", "weights", "limit", "kind", "said"), OTHERS)
def test_a_reply_of_another_length_or_of_other_weights_is_refused(
    changes: dict[Any, Any], weights: Weights, limit: int, kind: str, said: str
) -> None:
    with pytest.raises(EngineFault) as fault:
        checked(changes, weights=weights, request=replace(REQUEST, max_new_tokens=limit))
    assert (fault.value.kind, str(fault.value)[: len(said)]) == (kind, said)


# What only a local engine, or one of somebody's own, could give; the rest of the rules is above.
UNRECORDABLE = [
    (Completion((), (), 0), "0 tokens where 1 to 3 were asked for"),
    (Completion((5, 6), (-1.0, -1.0), 0, (1.0,)), "1 entropies for 2 tokens"),
    (Completion((5,), (-1.0,), 0, (math.inf,)), "entropies with inf among them"),
    (Completion((5,), (2e-6,), 0), "a log-prob of 2e-06, which is above 0"),
    (Completion((5, 6), (-1.0, -1.0), (1,)), "1 policy versions for 2 tokens"),
    (Completion((-1,), (-1.0,), 0), "token -1 of a vocabulary of 20"),
]


@pytest.mark.parametrize(("reply", "said"), UNRECORDABLE)
def test_a_reply_of_any_engine_is_recorded_only_if_it_holds(reply: Completion, said: str) -> None:
    found = recordable(REQUEST, reply, vocab_size=20)
    assert isinstance(found, GenerationFailed) and str(found) == said
    rounded = Completion((5, 9), (1e-6, 0.0), 0)  # above 0 by rounding
    assert recordable(REQUEST, rounded, vocab_size=20) is rounded
