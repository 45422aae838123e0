"""A buffer whose every text would like to be something else: HTML, a script, a template, a terminal command, an arrow
that turns the line around.

`MARK` is the name of an element and of an address: a page in which there is such an element, or that asks for such an
address, has shown text as HTML.
"""

from dataclasses import replace
from typing import Any

from context.messages import Message, ToolCall
from context.tokens.token_sequence import Segment
from replay import ReplayStore
from replay.records import HeldOutEpisode, TaskRecord, Trajectory
from replay.storage.collecting.ticket_records import TicketRecord
from replay.storage.databases import Location
from tests.fakes.records import SHORT, a_run, fresh_draws, group, iteration_record, measured, policy, trajectory

MARK = "hostile-mark"
SUM = "4900280003"
"""What {{70001*70003}} becomes where it is run as a template."""
MARKUP = (
    f"<{MARK}>bold</{MARK}>",
    f"</script></template></textarea></title><script>window.hostile=1;alert('{MARK}')</script>",
    f"\"'><img src=/{MARK}.png onerror=\"window.hostile=1;alert('{MARK}')\">",
    f"--><svg onload=alert('{MARK}')><!--",
    "{{70001*70003}}{% raw %}${70001*70003}<%= 70001*70003 %>",
    f"javascript:alert('{MARK}')",
    f"<a href=\"javascript:alert('{MARK}')\">here</a><form action=//{MARK}.example><button>go</button></form>",
    "&lt;b&gt;&#60;i&#62;&amp;",
)
CONTROLS = "\x01\x08\x1b[31mred\x1b]8;;http://x\x07\x7f\x9b"
BIDI = "\u202egnp.exe\u202c\u2066\u2067\u2068\u2069\u200e\u200f\u061c"
INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u00ad\u180e\u2028\u2029"
MARKED = " ".join(MARKUP)
TEXT = f"{MARKED} {CONTROLS} {BIDI} {INVISIBLE}"
SPOKEN = f"{TEXT} NUL \x00, half \ud83d, mark \ue000json:x"
"""Messages can hold what columns can't."""

RUN = "../run-<hostile-mark>\u202e?a=1&b=2#c"
TASK = "task/%2e%2e/<hostile-mark>'\"\\"
HOSTILE = "<hostile-mark>/../..\\'\"; drop table trajectories; --\u202e"
PLAIN = "plain"
EMPTY = "empty"


def messages() -> tuple[Message, ...]:
    call = ToolCall("lookup", {"key": SPOKEN, TEXT: [SPOKEN, {"x": None}]}, "call-0")
    return (
        Message("system", SPOKEN, author="initialization"),
        Message("user", SPOKEN),
        Message("assistant", SPOKEN, author="llm", tool_calls=(call,), reasoning=SPOKEN),
        Message("tool", SPOKEN, author="env", name="lookup", tool_call_id="call-0", error_kind=SPOKEN),
        Message("assistant", MARKED, author="llm"),
    )


def hostile(id: str, **changes: Any) -> Trajectory:
    texts = dict.fromkeys(("stop_reason", "environment", "environment_version", "logprobs_mode"), TEXT)
    place = {"run": RUN, "task": TASK, "source": "import", "group": f"group-{HOSTILE}"}
    segments = (Segment(SHORT), Segment(SHORT, reason=TEXT))
    return trajectory(id, segments=segments, messages=messages(), **{**texts, **place, **changes})


def hostile_buffer(location: Location) -> ReplayStore:
    store = ReplayStore.create(location)
    config = {"run": {"name": TEXT}, "replay": {"fraction": 0.5, "sampler": TEXT}, TEXT: TEXT}
    store.add_run(replace(a_run(RUN), name=TEXT, config=config, code_version=TEXT))
    store.add_run(a_run(EMPTY))
    for version in range(3):
        store.add_policy(policy(version, run=RUN))
    collected = group(f"group-{HOSTILE}", run=RUN, task=TASK)
    rows = [hostile(HOSTILE), hostile(PLAIN, member=1, slot=1, success=False, reward=0.0)]
    store.append([TaskRecord(TASK, TEXT, {TEXT: SPOKEN, "store": [MARKED]})], [collected], rows)
    for iteration in (1, 2):
        drawn = fresh_draws(rows, iteration=iteration)
        store.reserve_fresh(drawn)
        metrics = {"actor/grad_norm": 0.5, "rollout/success": 0.5, f"rollout/stop/{MARKED}": 0.5}
        done = iteration_record(iteration, replay=0, run=RUN, fresh=2, fraction=0.0, metrics=metrics)
        store.commit(done, measured(drawn), sampler_state={})
    _add_participants(store)
    said = tuple(Message(role, SPOKEN, author=MARKED) for role in ("user", "assistant"))
    asked = HeldOutEpisode(RUN, 2, 0, TASK, TEXT, TEXT, 0.5, False, MARKED, "raised", 1, 0, said)
    store.keep_held_out(RUN, [asked, replace(asked, number=1, messages=())], evaluations=1)
    return store


def _add_participants(store: ReplayStore) -> None:
    """A learner, workers and engines choose their names and texts."""
    facts = dict.fromkeys(("host", "state", "code_version", "label", "adapter", "model"), SPOKEN)
    for name in (HOSTILE, PLAIN, TEXT):
        store.roles.report("worker", RUN, name, {**facts, "concurrency": -1})
        store.roles.report("engine", RUN, name, {**facts, TEXT: [{SPOKEN: None}]})
    store.roles.lead(RUN, HOSTILE, lease_s=600.0)
    store.tickets.issue([], [TicketRecord(RUN, number, 0, TASK, 3) for number in range(3)])
    store.tickets.fail(store.tickets.claim(RUN, TEXT, count=1, lease_s=600.0), TEXT)
    store.tickets.claim(RUN, TEXT, count=1, lease_s=600.0)
