import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from context.authors import ENV, HISTORY, LLM, MEMORY, TEMPLATE, USER
from context.tokens.token_sequence import Segment
from replay import CorruptTrajectory, ReplayError, ReplayStore, questions
from replay.questions import Sort
from replay.questions.runs import merged_to
from replay.records import FRESH, DrawRecord
from replay.sampling.samplers import make_sampler
from tests.fakes.databases import Databases
from tests.fakes.records import RUN, Fresh, a_run, iterate, new_store, policy, put, request, sql, tokens, trajectory
from tests.fakes.replay_command import counted, listed


@pytest.fixture(scope="module")
def resumed_run(module_store: ReplayStore) -> ReplayStore:
    """Four iterations, the last one resumed over; 8 fresh rows each, up to 3 drawn; three reserved for a fifth."""
    store, sampler = module_store, make_sampler("success", 3)
    for iteration in range(1, 5):
        iterate(store, iteration, sampler, count=3)
    store.resume(RUN, 3)
    iterate(store, 4, sampler, count=3, attempt=1)
    (drawn, _) = store.draw(request(5, 2), sampler)
    store.reserve_fresh([DrawRecord(RUN, 5, 0, drawn.trajectory.record.id, FRESH, probability=None, staleness=0)])
    return store


def test_summary_agrees_with_plain_sql(resumed_run: ReplayStore) -> None:
    answer = questions.summary(resumed_run)
    plain = "select count(*), sum(num_tokens), sum(num_action_tokens) from trajectories"
    names = ("trajectories", "tokens", "action_tokens")
    assert tuple(answer[name] for name in names) == sql(resumed_run, plain)[0]
    plain = "select count(*), sum(cast(success as integer)), avg(reward) from trajectories where state <> 'orphaned'"
    assert tuple(answer[name] for name in ("episodes", "successes", "reward_mean")) == sql(resumed_run, plain)[0]
    for table in ("iterations", "policies", "v_groups", "tasks", "runs"):
        assert answer[table.removeprefix("v_")] == sql(resumed_run, f"select count(*) from {table}")[0][0]
    streams = dict(sql(resumed_run, "select stream, count(*) from draws where state='committed' group by stream"))
    assert {stream: answer["draws"][stream] for stream in ("fresh", "replay")} == streams
    plain = (
        "select count(distinct trajectory), avg(cast(staleness as double precision)), max(staleness) from draws "
        "where stream='replay' and state='committed'"
    )
    replayed = ("trajectories_replayed", "staleness_mean", "staleness_max")
    assert tuple(answer["draws"][name] for name in replayed) == sql(resumed_run, plain)[0]
    # 5 x 8 rows, 8 of them of the iteration that was resumed over; 4 x 8 fresh draws and 3 x 3 of replay.
    states = {state: row["trajectories"] for state, row in answer["states"].items()}
    assert states == {"eligible": 32, "orphaned": 8}
    assert [answer["draws"][name] for name in ("fresh", "replay", "reserved")] == [32, 9, 3]
    assert answer["stop_reasons"] == {"final": 32}
    # Eight rows that can be drawn of each of policies 0 to 3, where 4 is the newest: 1, 2, 3 and 4 publishes ago.
    assert answer["staleness"] == {"mean": 2.5, "max": 4, "known": 32}
    newer = questions.summary(resumed_run, RUN, filter="iteration > 2")["staleness"]
    assert newer == {"mean": 1.5, "max": 2, "known": 16}
    of_first = questions.summary(resumed_run, RUN, filter="iteration == 1 and success")
    assert (of_first["trajectories"], of_first["groups"], of_first["draws"]["fresh"]) == (3, 2, 3)
    nothing = questions.summary(resumed_run, "another run")
    json.dumps(nothing, allow_nan=False)
    assert (nothing["trajectories"], nothing["reward_mean"], nothing["states"]) == (0, None, {})
    assert nothing["staleness"] == {"mean": None, "max": None, "known": 0}


def test_trajectory_has_its_tokens_as_numbers_and_every_use(resumed_run: ReplayStore) -> None:
    most = listed(resumed_run, sort=Sort.uses)[0]
    answer = questions.trajectory(resumed_run, most["id"])
    json.dumps(answer, allow_nan=False)
    segment = answer["segments"][0]
    assert segment["token_ids"] == [5, 6, 7, 8, 9, 10]
    assert segment["authors"] == ["template", "user", "llm", "llm", "env", "llm"]
    assert segment["loss_mask"] == [False, False, True, True, False, True]
    assert segment["behavior_log_probs"] == [None, None, -0.5, -1.0, None, -1.5]
    plain = "select iteration, slot from draws where trajectory = ? and state = 'committed' order by 1, 2"
    assert [(use["iteration"], use["slot"]) for use in answer["uses"]] == sql(resumed_run, plain, most["id"])
    assert len(answer["uses"]) == most["uses"] + 1 >= 2  # once as a fresh row
    assert answer["messages"][2]["tool_calls"] == [{"name": "lookup", "arguments": {"key": "k1"}, "id": "call-0"}]
    last = answer["uses"][-1]
    assert last["makes_policy_version"] == last["iteration"]
    of_last_draw = {"value": 0.5, "run": RUN, "iteration": last["iteration"]}
    assert questions.tokens(resumed_run, most["id"])["advantage"] == of_last_draw


def test_trajectory_is_found_by_the_beginning_of_its_id(store: ReplayStore) -> None:
    put(store, trajectory("abc1"), trajectory("abc2"), trajectory("%bc"), trajectory("abc2x"))
    assert questions.find(store, "abc1") == "abc1"
    assert questions.find(store, "%") == "%bc"
    assert questions.find(store, "abc2") == "abc2"  # whole, though another begins with it
    with pytest.raises(ReplayError, match="got 'abc', which begins more than one: abc1, abc2, abc2x"):
        questions.find(store, "abc")
    for prefix in ("", "zz", "_", "ABC1", "' or 1=1 --", "\x00", "\ud800"):
        with pytest.raises(ReplayError, match="which begins"):
            questions.find(store, prefix)


def test_metrics_of_a_long_run_are_told_in_points_of_several_iterations(store: ReplayStore) -> None:
    store.add_metrics(RUN, 0, {"loss": 8.0, "eval/success": 0.25})
    for iteration, loss in enumerate([1.0, 2.0, float("nan"), 6.0, 4.0, 5.0, 9.0], start=1):
        store.add_metrics(RUN, iteration, {"loss": loss, "ratio_max": loss, "climax": 0.0})
    store.add_metrics(RUN, 2, {"climax": 4.0})
    store.add_metrics(RUN, 4, {"eval/success": 0.5})
    # Cut short were episodes of iterations 2, 6 and 7, the last of which is the only one of its point so far.
    for iteration, share in ((2, 0.3), (6, 0.2), (7, 0.6)):
        store.add_metrics(RUN, iteration, {"rollout/stop/length": share})
    assert questions.metric_series(store, RUN, merged=3) == {
        "loss": [(0, 8.0), (1, 1.5), (4, 5.0), (7, 9.0)],
        "ratio_max": [(1, 2.0), (4, 6.0), (7, 9.0)],
        "climax": [(1, pytest.approx(4 / 3)), (4, 0.0), (7, 0.0)],
        "eval/success": [(0, 0.25), (4, 0.5)],
        "rollout/stop/length": [(1, pytest.approx(0.1)), (4, pytest.approx(0.2 / 3)), (7, 0.6)],
    }
    assert questions.metric_series(store, RUN, names=["loss"], within=range(6, 9)) == {"loss": [(6, 5.0), (7, 9.0)]}
    # A point that stands half within is whole, and what is before training comes only where it is asked for.
    loss = questions.metric_series(store, RUN, merged=3, names=["loss"], within=range(2, 5))
    assert loss == {"loss": [(1, 1.5), (4, 5.0)]}
    assert questions.metric_series(store, RUN, merged=3, names=["loss"], within=range(1)) == {"loss": [(0, 8.0)]}
    # By name, and by how the name begins.
    store.add_metrics(RUN, 1, {"losses": 2.0, "ess/age_1": 3.0, "ess/age-1": 4.0, "stop/%": 5.0})
    found = questions.metric_series(store, RUN, names=["losses", "nothing"], families=["ess/age_", "stop/"])
    assert found == {"losses": [(1, 2.0)], "ess/age_1": [(1, 3.0)], "stop/%": [(1, 5.0)]}
    # Curves of at most 256 points.
    assert [merged_to(newest) for newest in (-1, 0, 256, 257, 512, 513)] == [1, 1, 1, 2, 2, 4]


class Bytes:
    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


def in_bytes(run: str) -> Bytes:
    return Bytes()


FIRST = tokens([1, 2, 3, 4, 5, 6, 7], [TEMPLATE, USER, LLM, LLM, ENV, LLM, LLM])
ASIDE = tokens([1, 9, 30, 31], [TEMPLATE, USER, LLM, LLM])
THEN = tokens([1, 2, 3, 8, 7, 7], [TEMPLATE, USER, HISTORY, MEMORY, LLM, LLM], version=1)


@pytest.fixture(scope="module")
def split(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayStore]:
    """`a`: two turns, a question aside, a third turn in a rewritten context; `c` has the same tokens and one turn less.

    `b`, of the same group, is scored.
    """
    store = new_store(databases.new(tmp_path_factory.mktemp("split") / "replay.sqlite"))
    segments = (Segment(FIRST), Segment(ASIDE, "fork"), Segment(THEN, "strategy_rewrite"))
    rows = [trajectory("a", segments=segments, num_turns=3), trajectory("b", member=1, slot=1, reward=0.0)]
    rows.append(trajectory("c", segments=segments, num_turns=2, member=2, slot=2))
    put(store, *rows)
    current = np.array([np.nan, np.nan, -0.5, -1.5, np.nan, 100.0], np.float32)
    store.add_scores(RUN, 4, {("b", 0): current})
    yield store
    store.close()


def test_overview_tells_why_segments_split_and_where_they_part(split: ReplayStore) -> None:
    answer = questions.overview(split, "a", codec_of=in_bytes)
    json.dumps(answer, allow_nan=False)
    found = [(part["reason"], part["num_tokens"], part["turns"]) for part in answer["segments"]]
    assert found == [("clean", 7, [0, 1]), ("fork", 4, None), ("strategy_rewrite", 6, [2, 2])]
    # Both are compared with the conversation's segment before: 1 2 3 4 ... with 1 9 ..., and with 1 2 3 8 ...
    assert [part["parted"] and part["parted"]["index"] for part in answer["segments"]] == [None, 1, 3]
    found = answer["segments"][2]["parted"]["token_ids"]
    assert found == {"same": [1, 2, 3], "was": [4, 5, 6, 7], "becomes": [8, 7, 7]}
    assert answer["segments"][2]["parted"]["texts"]["becomes"] == "\x08\x07\x07"
    assert answer["record"]["num_turns"] == 3
    assert [row["id"] for row in answer["members"]] == ["a", "b", "c"]
    assert (answer["problem"], answer["scored"], answer["staleness"], answer["uses"]) == (None, None, 0, [])
    assert questions.overview(split, "b")["scored"] == {"run": RUN, "policy_version": 4}


def test_tokens_know_their_turn_and_those_of_a_range_are_those_of_the_whole(split: ReplayStore) -> None:
    turns = [questions.tokens(split, "a", position)["turns"] for position in range(3)]
    assert turns == [[None, None, 0, 0, None, 1, 1], [None] * 4, [None, None, None, None, 2, 2]]
    # Of three replies the last two are the turns of `c`: the first was spoken in the policy's place.
    assert questions.tokens(split, "c")["turns"] == [None, None, None, None, None, 0, 0]
    assert questions.tokens(split, "c", 2)["turns"] == [None, None, None, None, 1, 1]
    whole = questions.tokens(split, "a", 2, codec_of=in_bytes)
    part = questions.tokens(split, "a", 2, first=2, count=3, codec_of=in_bytes)
    assert (part["first"], part["total"]) == (2, 6)
    for name in ("token_ids", "texts", "loss_mask", "behavior_log_probs", "policy_versions", "advantages", "turns"):
        assert part[name] == whole[name][2:5]
    assert [part["author_names"][place] for place in part["authors"]] == ["history", "memory", "llm"]
    assert part["advantages"] == [None, None, 0.5]
    assert part["policy_versions"] == [None, None, 1]
    assert questions.tokens(split, "a", 2, first=99)["token_ids"] == []
    with pytest.raises(ReplayError, match="segment must be from 0 to 2, got 3"):
        questions.tokens(split, "a", 3)


def test_tokens_of_a_scored_row_have_new_log_probs_and_clamped_drift(split: ReplayStore, store: ReplayStore) -> None:
    answer = questions.tokens(split, "b")
    json.dumps(answer, allow_nan=False)
    # Behavior log-probs are -0.5, -1.0, -1.5: log drifts 0, -0.5 and 101.5, which is clamped to 20 nats.
    assert answer["current_log_probs"] == [None, None, -0.5, -1.5, None, 100.0]
    assert answer["drift"] == [None, None, 1.0, round(math.exp(-0.5), 6), None, round(math.exp(20.0), 6)]
    assert answer["scored_by"] == {"run": RUN, "policy_version": 4}
    unscored = questions.tokens(split, "a")
    assert (unscored["current_log_probs"], unscored["drift"], unscored["scored_by"]) == (None, None, None)
    put(store, trajectory("a", num_turns=3))
    assert questions.tokens(store, "a")["turns"] == [None] * 6  # there are fewer replies than turns
    store.add_scores(RUN, 1, {("a", 0): np.zeros(6, np.float32)})
    sql(store, "update token_scores set log_probs = ?", bytes(40))
    for ask in (questions.tokens, questions.trajectory):
        with pytest.raises(CorruptTrajectory, match="got scores: log_probs with a wrong header"):
            ask(store, "a")


def test_character_of_several_tokens_stands_with_the_first_wherever_a_range_begins(store: ReplayStore) -> None:
    ids = list("aé€😀".encode() * 9)  # 1 + 2 + 3 + 4 tokens, nine times
    said = Segment(tokens(ids, [LLM] * len(ids)))
    put(store, trajectory("a", segments=(said,), num_turns=1))
    texts = questions.tokens(store, "a", codec_of=in_bytes)["texts"]
    assert texts == ["a", "é", None, "€", None, None, "😀", None, None, None] * 9
    for first in range(20, 40):
        found = questions.tokens(store, "a", first=first, count=15, codec_of=in_bytes)
        assert found["texts"] == texts[first : first + 15]


def test_questions_about_a_trajectory_take_as_many_statements_whatever_its_size(store: ReplayStore) -> None:
    few = trajectory("few")
    parts = tuple(Segment(FIRST, "clean" if i == 0 else "strategy_rewrite") for i in range(40))
    members = [trajectory(f"m{i}", member=i, slot=i) for i in range(2, 40)]
    many = trajectory("many", segments=parts, member=1, slot=1, num_turns=80)
    put(store, few, replace(many, messages=many.messages * 50), *members, size=40)
    counts = []
    for id in ("few", "many"):
        with counted() as statements:
            questions.overview(store, id)
            questions.tokens(store, id)
        counts.append(len(statements))
    assert counts[0] == counts[1] <= 22


def test_runs_tell_how_far_each_came(store: ReplayStore) -> None:
    for run, tokenizer in (("run-2", "tok"), ("run-3", "other")):
        store.add_run(replace(a_run(run), name="another"))
        store.add_policy(policy(0, run=run, tokenizer=tokenizer))
    others = (RUN, "run-2", "run-3", "none")
    assert [questions.same_tokenizer(store, RUN, other) for other in others] == [True, True, False, False]
    Fresh(1).append_to(store)
    for iteration, success in ((0, 0.25), (4, 0.5), (8, float("nan"))):
        store.add_metrics(RUN, iteration, {"eval/success": success, "rollout/success": 1.0})
    found = {row["id"]: row for row in questions.runs(store)}
    assert list(found) == ["run-2", "run-3", RUN]  # by name
    assert list(questions.run_names(store).items()) == [(id, row["name"]) for id, row in found.items()]
    assert (found[RUN]["success"], found[RUN]["trajectories"], found[RUN]["iterations"]) == (0.5, 4, 0)
    assert (found["run-2"]["success"], found["run-2"]["trajectories"]) == (None, 0)
