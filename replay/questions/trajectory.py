"""One trajectory: its facts, its group and task, every update that used it, and its prompt and answer in short."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, takewhile
from typing import Any

import numpy as np
import sqlalchemy as sa

from context.authors import HISTORY, AuthorTable
from context.messages import Message, plain_message
from context.tokens.loss_mask import loss_mask, response_mask
from context.tokens.session_nodes import Fork, Node
from context.tokens.session_segments import trained_in
from context.tokens.token_sequence import Decoder, Segment
from context.wording import excerpt, shared_opening
from replay.questions.filters.query import QueryResult, find_one
from replay.questions.tokens import CodecOf, no_codec, scorer, scores_of, turns_of, whole_segments
from replay.records import COMMITTED, EVICTED, Trajectory
from replay.sampling.compatibility import difference_names, run_mismatches
from replay.storage.format import schema
from replay.storage.format.rows import known, readable_messages
from replay.storage.format.schema import FACTS, draws, groups, iterations, messages, policies, reclaimed, tasks
from replay.storage.labels import labels_of
from replay.storage.read import author_table, load
from replay.storage.staleness import publishes_since
from replay.storage.statements import selected
from replay.store import ReplayStore

_rows = schema.trajectories.c
_MOST_MEMBERS = 256
_MOST_EARLIER = 32
"""Most earlier segments of a session that a segment is compared with."""
_SHOWN = 12
"""Tokens that are shown where a segment begins to differ from an earlier one."""


def find(store: ReplayStore, id_prefix: str) -> str:
    """Find the one trajectory with this id, or whose id begins with it. Raises ReplayError for none or several."""
    with store.reading() as connection:
        ids = (sa.select(_rows.id), sa.select(reclaimed.c.id))
        return find_one(connection, id_prefix, *ids, name="ID", of="trajectory's id", advice="See: agentloop replay ls")


def overview(store: ReplayStore, id_prefix: str, *, codec_of: CodecOf = no_codec) -> QueryResult:
    """Return everything about a trajectory but its tokens, in whatever state the row is.

    `problem` tells why there are no tokens; None: there are. A corrupt row has no `record`, `group` and `task`, because
    they can't be trusted. An evicted row has no `record`; `reclaimed` has the facts that are left.
    `iteration_committed` tells whether `iteration` can answer for the iteration that collected the row; it can't for an
    import. `requests` are those of an agent's session.
    """
    id = find(store, id_prefix)
    with store.reading() as connection:
        loaded = load(connection, [id])
        answer = {**_NOTHING, "id": id, "uses": _uses(connection, id), "children": _children(connection, id)}
        if id in loaded.gone.keys() - loaded.without_tokens:
            return answer | _evicted_facts(connection, id)
        state, reason = connection.execute(sa.select(_rows.state, _rows.state_reason).where(_rows.id == id)).one()
        labels = [vars(label) for label in labels_of(connection, [id]).get(id, ())]
        answer |= {"state": state, "state_reason": reason, "labels": labels}
        if id in loaded.corrupt:
            return answer | {"problem": {"kind": "corrupt", "reason": loaded.corrupt[id]}}
        found = loaded.without_tokens.get(id) or loaded.whole[id]
        authors = author_table(connection, found.record.run)
        scores = {position: scorer(score) for position, score in scores_of(connection, id).items()}
        answer |= _surroundings(connection, found)
    facts = vars(found.record)
    return {
        **answer,
        "problem": {"kind": "gone", "reason": reason} if id in loaded.gone else None,
        "record": {name: known(value) if isinstance(value, float) else value for name, value in facts.items()},
        "authors": [vars(author) for author in authors.authors],
        "segments": _segment_facts(found, authors, scores, codec_of(found.record.run)),
        "scored": max(scores.values(), key=lambda score: int(score["policy_version"]), default=None),
        "messages": [*map(plain_message, found.messages)],
        "requests": requests_of(found.nodes),
    }


_MOST_CHILDREN = 20
_NOTHING: QueryResult = {
    **dict.fromkeys(("record", "reclaimed", "group", "task", "staleness", "scored", "iteration_committed")),
    "newest_iteration": None,
    **{name: [] for name in ("authors", "members", "segments", "messages", "requests", "labels")},
}


def _children(connection: sa.Connection, id: str) -> list[str]:
    """List the stored rows that were made from this one."""
    query = sa.select(_rows.id).where(_rows.parent == id).order_by(_rows.iteration, _rows.slot, _rows.id)
    return list(connection.scalars(query.limit(_MOST_CHILDREN)))


def _evicted_facts(connection: sa.Connection, id: str) -> QueryResult:
    """Return the remaining facts of an evicted row. Its run, iteration and task come from its group."""
    query = sa.select(*(reclaimed.c[name] for name in (*FACTS, "state_reason"))).where(reclaimed.c.id == id)
    left = connection.execute(query).mappings().one()
    group = _row_of(connection, groups.c.id, left["group"])
    run, iteration = group["run"], group["iteration"]
    return {
        **_collection_facts(connection, id, run, iteration, group["task"], reclaimed.c),
        "problem": {"kind": "reclaimed", "reason": left["state_reason"]},
        "state": EVICTED,
        "state_reason": left["state_reason"],
        "group": group,
        "reclaimed": {**left, "run": run, "iteration": iteration, "group": group},
    }


def trajectory(store: ReplayStore, id_prefix: str) -> QueryResult:
    """Return the overview of a trajectory with every token as numbers. Raises CorruptTrajectory for damaged tokens."""
    answer = overview(store, id_prefix)
    if answer["problem"] is None or answer["problem"]["kind"] == "corrupt":
        with store.reading() as connection:
            (found,) = load(connection, [answer["id"]]).in_order([answer["id"]])
            authors = author_table(connection, found.record.run)
            answer["segments"] = whole_segments(connection, found, authors)
    return answer


def same_tokenizer(store: ReplayStore, run: str, other: str) -> bool:
    """Whether two runs have the same tokenizer. False if one of them does not state it."""
    if run == other:
        return True
    with store.reading() as connection:
        found = run_mismatches(connection, run, [other])
    return "tokenizer" not in difference_names(found[other])


def _row_of(connection: sa.Connection, key: sa.Column[str], value: str) -> QueryResult:
    return dict(connection.execute(sa.select(key.table).where(key == value)).mappings().one())


def _uses(connection: sa.Connection, id: str) -> list[QueryResult]:
    """List the draws of a trajectory that updates used, in order, with the version of the policy that each made."""
    made = (iterations.c.policy_version + 1).label("makes_policy_version")
    same = (iterations.c.run == draws.c.run) & (iterations.c.iteration == draws.c.iteration)
    query = sa.select(draws, made).select_from(draws.outerjoin(iterations, same))
    query = query.where(draws.c.trajectory == id, draws.c.state == COMMITTED)
    found = connection.execute(query.order_by(draws.c.run, draws.c.iteration, draws.c.slot)).mappings()
    return [dict(row) for row in found]


def _surroundings(connection: sa.Connection, found: Trajectory) -> QueryResult:
    """Return a row's group with its stored members, its task and its staleness."""
    record = found.record
    columns = (_rows.id, _rows.member, _rows.attempt, _rows.reward, _rows.success, _rows.state)
    members = sa.select(*columns).where(_rows.group == record.group).order_by(_rows.member, _rows.attempt, _rows.id)
    return {
        **_collection_facts(connection, record.id, record.run, record.iteration, record.task, _rows),
        "group": _row_of(connection, groups.c.id, record.group),
        "members": [dict(row) for row in connection.execute(members.limit(_MOST_MEMBERS)).mappings()],
    }


def _collection_facts(
    connection: sa.Connection, id: str, run: str, iteration: int, task: str, kept: Any
) -> QueryResult:
    """Return a row's task, its staleness and its run's newest iteration. `kept` has the columns of the row's table."""
    newest = sa.select(sa.func.max(policies.c.version)).where(policies.c.run == run)
    last = sa.select(sa.func.max(iterations.c.iteration)).where(iterations.c.run == run).scalar_subquery()
    collected = sa.exists().where(iterations.c.run == run, iterations.c.iteration == iteration)
    age = sa.select(publishes_since(newest.scalar_subquery(), kept)).where(kept.id == id).scalar_subquery()
    staleness, committed, newest_iteration = connection.execute(sa.select(age, collected, last)).one()
    return {
        "newest_iteration": newest_iteration,
        "iteration_committed": bool(committed),
        "task": _row_of(connection, tasks.c.hash, task),
        "staleness": staleness,
    }


def _segment_facts(
    found: Trajectory, authors: AuthorTable, scores: dict[int, QueryResult], codec: Decoder | None
) -> list[QueryResult]:
    """Return the facts of each segment: its length, why it begins, and where it differs from an earlier one.

    In a conversation the earlier one is the segment before it. In a session it is the segment with the longest common
    beginning.
    """
    turns = turns_of(found, authors)
    earlier: list[Segment] = []
    answers: list[QueryResult] = []
    for position, (segment, turn) in enumerate(zip(found.segments, turns, strict=True)):
        tokens = segment.tokens
        sampled = np.unique(turn[turn >= 0]).tolist()
        before = max(earlier, key=lambda one: _common_start(one, segment), default=None)
        answers.append(
            {
                "position": position,
                "reason": segment.reason,
                "behavior_context": segment.behavior_context,
                "num_tokens": len(tokens),
                "num_action_tokens": int(response_mask(tokens, authors).sum()),
                "num_trained_tokens": int(loss_mask(tokens, authors).sum()),
                "turns": [sampled[0], sampled[-1]] if sampled and not found.nodes else None,
                "requests": sampled if found.nodes else [],
                "parted": None if before is None else _find_parting(before, segment, codec),
                "scored_by": scores.get(position),
            }
        )
        if found.nodes:
            earlier = [*earlier[-_MOST_EARLIER:], segment]
        elif segment.reason != "fork":
            earlier = [segment]
    return answers


def _common_start(one: Segment, other: Segment) -> int:
    """Count the tokens that two segments have in common at their beginning."""
    first, second = one.tokens.token_ids, other.tokens.token_ids
    shorter = min(len(first), len(second))
    differs = first[:shorter] != second[:shorter]
    return int(np.argmax(differs)) if differs.any() else shorter


def _find_parting(before: Segment, now: Segment, codec: Decoder | None) -> QueryResult:
    """Return the first token that differs between two segments, with some tokens before and behind it."""
    was, becomes = before.tokens.token_ids, now.tokens.token_ids
    index = _common_start(before, now)
    ids = {
        "same": was[max(0, index - _SHOWN) : index].tolist(),
        "was": was[index : index + _SHOWN].tolist(),
        "becomes": becomes[index : index + _SHOWN].tolist(),
    }
    texts = None if codec is None else {name: codec.decode(values) for name, values in ids.items()}
    return {"index": index, "token_ids": ids, "texts": texts}


def requests_of(nodes: Sequence[Node]) -> list[QueryResult]:
    """Return the facts of each request of a session.

    `begins` names the request that it continues, or the reason for a fork. `segment` is the training sequence that
    trains its reply; None: none does. `first_message` is the position of its first message among those of all requests.
    """
    sequence = trained_in(nodes)
    starts = accumulate((len(node.messages) for node in nodes), initial=0)
    return [
        {
            "number": node.number,
            "agent": node.agent,
            "status": str(node.status),
            "begins": _begins(node),
            "lanes": lanes,
            "parent": node.place.parent,
            "fork": None if node.place.fork is None else str(node.place.fork),
            "kept_tokens": node.place.kept_tokens,
            "new_tokens": len(node.tokens) - node.num_sampled,
            "sampled_tokens": node.num_sampled,
            "segment": sequence.get(node.number),
            "first_message": start,
            "num_messages": len(node.messages),
        }
        for node, start, lanes in zip(nodes, starts, _lanes(nodes), strict=False)
    ]


def _begins(node: Node) -> str:
    fork, parent = node.place.fork, node.place.parent
    if fork is None:
        return f"goes on from {parent}"
    if parent is None or fork == Fork.NEW:
        return str(fork)
    return f"{fork}, from {parent}"


def _lanes(nodes: Sequence[Node]) -> list[str]:
    """Draw the branches of a session, one line per request.

    A dot marks the branch of the request, and a stroke every other branch that later requests continue. A branch that
    has ended leaves its column to the next one.
    """
    last = {node.number: node.number for node in nodes}
    last |= {
        node.place.parent: node.number for node in nodes if node.place.fork is None and node.place.parent is not None
    }
    tips: list[int] = []
    lines = []
    for number, place in ((node.number, node.place) for node in nodes):
        free = [lane for lane, tip in enumerate(tips) if last[tip] < number]
        if place.fork is None and place.parent in tips:
            lane = tips.index(place.parent)
        else:
            lane = free[0] if free else len(tips)
        tips[lane : lane + 1] = [number]
        marks = ("\u25cf" if tip == number else "\u2502" if last[tip] > number else " " for tip in tips)
        lines.append(" ".join(marks).rstrip())
    return lines


MOST_SHORT = 200
"""Most characters of a short prompt or answer."""
_READ = 8 * MOST_SHORT
"""Characters of a text that are read to shorten it. Spaces and line ends in a row become one space."""
_SENTENCE = re.compile(r"[.!?:] ")
NONE: QueryResult = {"prompt": None, "answer": None}


def excerpts(store: ReplayStore, ids: Sequence[str]) -> dict[str, QueryResult]:
    """Return short prompts and answers by the ids of trajectories, as `excerpts_of` does. Missing rows have None."""
    with store.reading() as connection:
        found = excerpts_of(connection, ids)
    return {id: found.get(id, NONE) for id in ids}


def excerpts_of(connection: sa.Connection, ids: Sequence[str]) -> dict[str, QueryResult]:
    """Return the short `prompt` and `answer` of each row whose messages are stored, by id.

    The prompt is the last user message before the policy's first reply. The answer is the policy's last reply, or its
    tool calls if the reply has no text. A part is None if there is no such message, or the messages are damaged.
    """
    said = dict(conversations_of(connection, ids))
    return dict(zip(said, shorten_conversations([*said.values()]), strict=True))


def conversations_of(connection: sa.Connection, ids: Sequence[str]) -> Iterator[tuple[str, tuple[Message, ...] | None]]:
    """Yield the id and the messages of each row whose messages are stored. None: the messages are damaged."""
    for row in selected(connection, [*messages.c], messages.c.trajectory, ids):
        yield row.trajectory, readable_messages(row.num_messages, row.said, row.checksum)


def shorten_conversations(conversations: Sequence[Sequence[Message] | None]) -> list[QueryResult]:
    """Return the short prompt and answer of each conversation of a list; None can't be read.

    Prompts begin where they begin to differ: behind the words that all of them share, and behind sentences that one
    shares with another. Different prompts that would look alike then begin at their first word.
    """
    texts = [(None, None) if each is None else _prompt_and_answer(each) for each in conversations]
    starts = _differing_starts({prompt for prompt, _ in texts if prompt})
    shown = {prompt: "\u2026 " * (start > 0) + excerpt(prompt[start:], MOST_SHORT) for prompt, start in starts.items()}
    alike = Counter(shown.values())
    shown |= {prompt: excerpt(prompt, MOST_SHORT) for prompt, text in shown.items() if alike[text] > 1}
    return [{"prompt": shown.get(prompt or "", prompt), "answer": answer} for prompt, answer in texts]


def _differing_starts(prompts: set[str]) -> dict[str, int]:
    """Return where each prompt begins to differ from the others."""
    ordered = sorted(prompts)
    words = shared_opening(ordered[0], ordered[-1]).rfind(" ") + 1 if len(ordered) > 1 else 0
    starts = dict.fromkeys(ordered, words)
    for one, other in pairwise(ordered):
        ends = [found.end() for found in _SENTENCE.finditer(shared_opening(one, other))]
        starts |= {each: max([starts[each], *ends]) for each in (one, other)}
    return starts


def question_in(conversation: Iterable[Message]) -> Message | None:
    """Return the last user message before the policy's first reply; without one, the last message before it."""
    asked = list(opening(conversation))
    return next(reversed([message for message in asked if message.role == "user"] or asked), None)


def _prompt_and_answer(conversation: Sequence[Message]) -> tuple[str | None, str | None]:
    prompt = question_in(conversation)
    reply = next(filter(_is_reply, reversed(conversation)), None)
    question = None if prompt is None else _spaced(prompt.content)
    return question, None if reply is None else excerpt(_spaced(_answer(reply)), MOST_SHORT)


def opening(conversation: Iterable[Message]) -> Iterator[Message]:
    """Return the messages before the policy's first reply. Replies in the task's own history are among them."""
    return takewhile(lambda message: not _is_reply(message), conversation)


def _spaced(text: str) -> str:
    return " ".join(text[:_READ].split())


def _is_reply(message: Message) -> bool:
    return message.role == "assistant" and message.author != HISTORY


def _answer(reply: Message) -> str:
    calls = (f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})" for call in reply.tool_calls)
    return reply.content.strip() or " ".join(calls) or (reply.reasoning or "")
