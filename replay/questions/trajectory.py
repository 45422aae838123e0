"""One trajectory: what is known of it, where it stands among others, every update that used it; and in few words."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, takewhile
from typing import Any

import numpy as np
import sqlalchemy as sa

from context.authors import HISTORY, AuthorTable
from context.messages import Message, plain_message
from context.tokens.loss_mask import loss_mask, response_mask
from context.tokens.session_nodes import Fork, Node
from context.tokens.session_segments import trained_in
from context.tokens.token_sequence import Decoder, Segment
from context.wording import excerpt
from replay.errors import ReplayError
from replay.questions.filters.query import QueryResult
from replay.questions.tokens import CodecOf, no_codec, same_start, turns_of, whole_segments
from replay.records import COMMITTED, EVICTED, Trajectory
from replay.sampling.compatibility import difference_names, run_mismatches
from replay.storage.format import schema
from replay.storage.format.column_types import ExactText
from replay.storage.format.rows import known, readable_messages
from replay.storage.format.schema import FACTS, draws, groups, iterations, messages, policies, reclaimed, tasks
from replay.storage.labels import labels_of
from replay.storage.read import author_table, load
from replay.storage.staleness import publishes_since
from replay.storage.statements import selected
from replay.storage.tombstones import COLLECTED, with_collected
from replay.store import ReplayStore

_rows = schema.trajectories.c
_MOST_MEMBERS = 256
_MOST_EARLIER = 32
"""Segments of a session before another one that it is compared with."""
_SHOWN = 12
"""Tokens shown where a segment parts from the one before."""


def find(store: ReplayStore, id_prefix: str) -> str:
    """The one trajectory whose id is this, or begins so."""
    found: list[str] = []
    with store.reading() as connection:
        for id in (_rows.id, reclaimed.c.id):
            if connection.scalar(sa.select(id).where(id == id_prefix)) is not None:
                return id_prefix
        for id in (_rows.id, reclaimed.c.id):
            begins = sa.func.substr(id, 1, len(id_prefix), type_=ExactText) == id_prefix
            found += connection.scalars(sa.select(id).where(begins).order_by(id).limit(3))
    if id_prefix and len(found) == 1:
        return str(found[0])
    which = "none" if not found else "more than one: " + ", ".join(found)
    raise ReplayError(
        f"ID must be the beginning of one trajectory's id, got {id_prefix!r}, which begins {which}. "
        "See: agentloop replay ls"
    )


def overview(store: ReplayStore, id_prefix: str, *, codec_of: CodecOf = no_codec) -> QueryResult:
    """All but the tokens, whatever state the row is in.

    `problem` is None, or says why there are no tokens: of a corrupt row nothing is shown that can't be trusted, and
    `record`, `group` and `task` are None; of an evicted one `record` is None and `reclaimed` says what is left.
    `iteration_committed`: whether the iteration it was collected in can be asked for; that of an import can't.
    `requests`: those of an agent's session.
    """
    id = find(store, id_prefix)
    with store.reading() as connection:
        loaded = load(connection, [id])
        answer = {**_NOTHING, "id": id, "uses": _uses(connection, id), "children": _children(connection, id)}
        if id in loaded.gone.keys() - loaded.without_tokens:
            return answer | _left(connection, id)
        state, reason = connection.execute(sa.select(_rows.state, _rows.state_reason).where(_rows.id == id)).one()
        labels = [vars(label) for label in labels_of(connection, [id]).get(id, ())]
        answer |= {"state": state, "state_reason": reason, "labels": labels}
        if id in loaded.corrupt:
            return answer | {"problem": {"kind": "corrupt", "reason": loaded.corrupt[id]}}
        found = loaded.without_tokens.get(id) or loaded.whole[id]
        authors = author_table(connection, found.record.run)
        scores = _scores(connection, id)
        answer |= _around(connection, found)
    return {
        **answer,
        "problem": {"kind": "gone", "reason": reason} if id in loaded.gone else None,
        "record": record_of(found),
        "authors": [vars(author) for author in authors.authors],
        "segments": _parts(found, authors, scores, codec_of(found.record.run)),
        "scored": max(scores.values(), key=lambda score: int(score["policy_version"]), default=None),
        "messages": [*map(plain_message, found.messages)],
        "requests": requests_of(found.nodes),
    }


_MOST_CHILDREN = 20
_NOTHING: QueryResult = {
    **dict.fromkeys(("record", "reclaimed", "group", "task", "staleness", "scored", "iteration_committed")),
    **{name: [] for name in ("authors", "members", "segments", "messages", "requests", "labels")},
}


def _children(connection: sa.Connection, id: str) -> list[str]:
    """Rows that were made from it, and are stored."""
    query = sa.select(_rows.id).where(_rows.parent == id).order_by(_rows.iteration, _rows.slot, _rows.id)
    return list(connection.scalars(query.limit(_MOST_CHILDREN)))


def _left(connection: sa.Connection, id: str) -> QueryResult:
    """What is left of an evicted row, whose run, iteration and task are its group's."""
    names = (*FACTS, "state_reason")
    row = connection.execute(sa.select(*(reclaimed.c[name] for name in names)).where(reclaimed.c.id == id)).one()
    left = dict(zip(names, row, strict=True))
    group = _row_of(connection, groups.c.id, left["group"])
    run, iteration = group["run"], group["iteration"]
    return {
        **_collected(connection, id, run, iteration, group["task"], reclaimed.c),
        "problem": {"kind": "reclaimed", "reason": left["state_reason"]},
        "state": EVICTED,
        "state_reason": left["state_reason"],
        "group": group,
        "reclaimed": {**left, "run": run, "iteration": iteration, "group": group},
    }


def trajectory(store: ReplayStore, id_prefix: str) -> QueryResult:
    """One trajectory whole, every token as numbers; CorruptTrajectory where they are not what was written."""
    answer = overview(store, id_prefix)
    if answer["problem"] is None or answer["problem"]["kind"] == "corrupt":
        with store.reading() as connection:
            (found,) = load(connection, [answer["id"]]).in_order([answer["id"]])
            authors = author_table(connection, found.record.run)
            answer["segments"] = whole_segments(connection, found, authors)
    return answer


def same_tokenizer(store: ReplayStore, run: str, other: str) -> bool:
    """Whether the tokens of two runs spell the same text; those of a run that does not say may be anything."""
    if run == other:
        return True
    with store.reading() as connection:
        found = run_mismatches(connection, run, [other])
    return "tokenizer" not in difference_names(found[other])


def record_of(found: Trajectory) -> QueryResult:
    return {name: known(value) if isinstance(value, float) else value for name, value in vars(found.record).items()}


def _row_of(connection: sa.Connection, key: sa.Column[str], value: str) -> QueryResult:
    return dict(connection.execute(sa.select(key.table).where(key == value)).mappings().one())


def _uses(connection: sa.Connection, id: str, *more: sa.Column[Any]) -> list[QueryResult]:
    """Every draw that fed an update, in order; `more`: columns of the policy that the update made."""
    made = iterations.c.policy_version + 1
    same = (iterations.c.run == draws.c.run) & (iterations.c.iteration == draws.c.iteration)
    published = (policies.c.run == draws.c.run) & (policies.c.version == made)
    query = sa.select(draws, made.label("makes_policy_version"), *more).select_from(
        draws.outerjoin(iterations, same).outerjoin(policies, published)
    )
    query = query.where(draws.c.trajectory == id, draws.c.state == COMMITTED)
    found = connection.execute(query.order_by(draws.c.run, draws.c.iteration, draws.c.slot)).mappings()
    return [dict(row) for row in found]


def _around(connection: sa.Connection, found: Trajectory) -> QueryResult:
    """Where it stands: its group with the members of it that are stored, its task, how stale it is."""
    record = found.record
    columns = (_rows.id, _rows.member, _rows.attempt, _rows.reward, _rows.success, _rows.state)
    members = sa.select(*columns).where(_rows.group == record.group).order_by(_rows.member, _rows.attempt, _rows.id)
    return {
        **_collected(connection, record.id, record.run, record.iteration, record.task, _rows),
        "group": _row_of(connection, groups.c.id, record.group),
        "members": [dict(row) for row in connection.execute(members.limit(_MOST_MEMBERS)).mappings()],
    }


def _collected(connection: sa.Connection, id: str, run: str, iteration: int, task: str, kept: Any) -> QueryResult:
    """`kept`: the columns of the table that the row is in."""
    newest = sa.select(sa.func.max(policies.c.version)).where(policies.c.run == run)
    collected = sa.exists().where(iterations.c.run == run, iterations.c.iteration == iteration)
    age = sa.select(publishes_since(newest.scalar_subquery(), kept)).where(kept.id == id).scalar_subquery()
    staleness, committed = connection.execute(sa.select(age, collected)).one()
    return {
        "iteration_committed": bool(committed),
        "task": _row_of(connection, tasks.c.hash, task),
        "staleness": staleness,
    }


def _scores(connection: sa.Connection, id: str) -> dict[int, QueryResult]:
    score = schema.token_scores.c
    found = connection.execute(sa.select(score.position, score.run, score.policy_version).where(score.trajectory == id))
    return {position: {"run": run, "policy_version": version} for position, run, version in found}


def _parts(
    found: Trajectory, authors: AuthorTable, scores: dict[int, QueryResult], codec: Decoder | None
) -> list[QueryResult]:
    """A line per segment: how long, why begun, and where it parts from what the policy had seen before: of the segments
    of a session, from the one that begins most like it."""
    turns = turns_of(found, authors)
    earlier: list[Segment] = []
    answers: list[QueryResult] = []
    for position, (segment, turn) in enumerate(zip(found.segments, turns, strict=True)):
        tokens = segment.tokens
        sampled = np.unique(turn[turn >= 0]).tolist()
        before = max(earlier, key=lambda one: _same(one, segment), default=None)
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
                "parted": None if before is None else _parting(before, segment, codec),
                "scored_by": scores.get(position),
            }
        )
        if found.nodes:
            earlier = [*earlier[-_MOST_EARLIER:], segment]
        elif segment.reason != "fork":
            earlier = [segment]
    return answers


def _same(one: Segment, other: Segment) -> int:
    return same_start(one.tokens.token_ids, other.tokens.token_ids)


def _parting(before: Segment, now: Segment, codec: Decoder | None) -> QueryResult:
    """The first token that differs from the segment of the conversation before, and some tokens from there on."""
    was, becomes = before.tokens.token_ids, now.tokens.token_ids
    index = _same(before, now)
    ids = {
        "same": was[max(0, index - _SHOWN) : index].tolist(),
        "was": was[index : index + _SHOWN].tolist(),
        "becomes": becomes[index : index + _SHOWN].tolist(),
    }
    texts = None if codec is None else {name: codec.decode(values) for name, values in ids.items()}
    return {"index": index, "token_ids": ids, "texts": texts}


def requests_of(nodes: Sequence[Node]) -> list[QueryResult]:
    """A line per request. `begins`: what it goes on from, or why it forks. `segment`: the training sequence in which
    its reply is trained; None: it is in none. `first_message`: where its messages begin among those of all."""
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
    """A line per request of a drawing of the branches: \u25cf where it stands, \u2502 for each that later ones go on
    from. A branch that has ended leaves its place to the next."""
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


def lineage_of(store: ReplayStore, id_prefix: str) -> QueryResult:
    """Where a trajectory, also an evicted one, came from, every update that used it, and the policies these made."""
    id = find(store, id_prefix)
    with store.reading() as connection:
        asked = sa.select(sa.literal(id, ExactText).label("id")).subquery()
        made_of = (sa.func.coalesce(_rows[name], reclaimed.c[name]).label(name) for name in ("parent", "kept_turns"))
        facts = sa.select(asked.c.id, *COLLECTED, *made_of, groups.c.success_rate)
        collected = connection.execute(facts.select_from(with_collected(asked, asked.c.id))).mappings()
        uses, children = _uses(connection, id, policies.c.checkpoint), _children(connection, id)
        stored = load(connection, [id]).whole.get(id)
        requests = [] if stored is None else requests_of(stored.nodes)
        return {**dict(collected.one()), "uses": uses, "children": children, "requests": requests}


MOST_SHORT = 200
"""Characters of a prompt or an answer in few words."""
_READ = 8 * MOST_SHORT
"""Characters of which the first are taken, once ends of lines and rows of spaces have become one space."""
NONE: QueryResult = {"prompt": None, "answer": None}


def excerpts(store: ReplayStore, ids: Sequence[str]) -> dict[str, QueryResult]:
    """`prompt` and `answer` by the ids of trajectories, whether they are stored or not: see `excerpts_of`."""
    with store.reading() as connection:
        found = excerpts_of(connection, ids)
    return {id: found.get(id, NONE) for id in ids}


def excerpts_of(connection: sa.Connection, ids: Sequence[str]) -> dict[str, QueryResult]:
    """`prompt` and `answer` by id, of the rows whose messages are stored.

    The prompt is the last message of a user before the policy's first reply, the answer its last reply; where that only
    called tools, the calls. None where nothing of the kind was said, or where the messages are damaged.
    """
    columns = (messages.c.trajectory, messages.c.num_messages, messages.c.said, messages.c.checksum)
    found = {}
    for row in selected(connection, columns, messages.c.trajectory, ids):
        said = readable_messages(row.num_messages, row.said, row.checksum)
        found[row.trajectory] = NONE if said is None else in_few_words(said)
    return found


def in_few_words(conversation: Sequence[Message]) -> QueryResult:
    asked = list(opening(conversation))
    by_users = [message for message in asked if message.role == "user"]
    prompt = next(reversed(by_users or asked), None)
    answer = last_answer(conversation)
    return {
        "prompt": None if prompt is None else in_one_line(prompt.content),
        "answer": None if answer is None else in_one_line(answer),
    }


def last_answer(conversation: Sequence[Message]) -> str | None:
    """The policy's last reply; where that only called tools, the calls."""
    return next((_answer(message) for message in reversed(conversation) if _is_reply(message)), None)


def opening(conversation: Iterable[Message]) -> Iterator[Message]:
    """All before the policy's first reply; what an assistant of the task's own history said is among it."""
    return takewhile(lambda message: not _is_reply(message), conversation)


def in_one_line(text: str, most: int = MOST_SHORT) -> str:
    return excerpt(" ".join(text[:_READ].split()), most)


def _is_reply(message: Message) -> bool:
    return message.role == "assistant" and message.author != HISTORY


def _answer(reply: Message) -> str:
    calls = (f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})" for call in reply.tool_calls)
    return reply.content.strip() or " ".join(calls) or (reply.reasoning or "")
