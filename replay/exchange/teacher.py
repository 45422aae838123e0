"""Other people's conversations as trajectories, rendered to the tokens that the run's own policy would have sampled.

The author of the replies is `demonstration`, which is trained and has no log-probs.
"""

import hashlib
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from context.authors import AuthorTable
from context.messages import content_hash
from context.parse import PARSERS
from context.templates.model_files import ModelFiles, load_model_files
from replay.exchange import jsonl
from replay.exchange.files import ExchangeError, lines, opened
from replay.exchange.importing import ImportReport, Placed, Progress, check_set_name, import_rows
from replay.exchange.json_text import BadRow
from replay.exchange.openai_chat import Conversation, read_line, record_conversation
from replay.exchange.row_format import Bundle
from replay.exchange.stored_rows import known_policies, known_runs
from replay.records import (
    PolicyRecord,
    RunRecord,
    StopReason,
    TaskRecord,
    Trajectory,
    TrajectoryRecord,
    group_of,
    group_statistics,
    stored_setting,
)
from replay.store import ReplayStore

SOURCE = "teacher"
ENVIRONMENT = "openai-chat"
_ENDLESS = 1 << 30
_Value = TypeVar("_Value")

GroupAdvantages = Callable[[Sequence[float], bool], Sequence[float]]
"""Computes the advantages of a group from its rewards; True divides them by the rewards' standard deviation."""


@dataclass(frozen=True)
class Teaching:
    """The settings by which conversations become rows."""

    run: RunRecord
    """The run whose policy learns from the rows."""
    policy: PolicyRecord
    """The run's newest policy, with its tokenizer and template."""
    model: ModelFiles
    group_advantages: GroupAdvantages
    reward: float | None = None
    """The reward of conversations that name none."""
    advantage: float | None = None
    """The advantage of every row; None: it is computed within the row's group."""


@dataclass
class TeacherReport(ImportReport):
    replies: int = 0
    groups: int = 0
    without_signal: int = 0
    """Rows with advantage 0: a loss that weighs by advantage learns nothing from them."""
    ignored: dict[str, int] = field(default_factory=dict)
    """How often each field that is not read stands in the file, by name."""


def teaching_of(
    store: ReplayStore,
    run: str | None,
    model: Path | None,
    group_advantages: GroupAdvantages,
    *,
    reward: float | None = None,
    advantage: float | None = None,
) -> Teaching:
    """The teaching for the run with this id, or for the only run that is not a set of conversations. `model` is the
    folder of the run's tokenizer and template."""
    with store.reading() as connection:
        known = known_runs(connection)
        learners = [id for id, record in known.items() if ENVIRONMENT not in str(record.config.get("import"))]
        learner = known.get(run or learners[0]) if run or len(learners) == 1 else None
        if learner is None:
            raise ExchangeError(
                f"RUN must name one run, got {run or 'a file'} of {len(learners)} runs. Give the run folder."
            )
        published = known_policies(connection, learner.id)
    if not published:
        raise ExchangeError(f"run {learner.id} must have published a policy, got none. Start it first.")
    policy = published[max(published)]
    if model is None or not model.is_dir():
        raise ExchangeError(
            f"RUN must be a run's folder, with its tokenizer and chat template, got {str(model)!r}. Name it."
        )
    return Teaching(learner, policy, load_model_files(model), group_advantages, reward, advantage)


def import_chat(
    store: ReplayStore,
    path: Path,
    teaching: Teaching,
    *,
    name: str = SOURCE,
    skip_bad: bool = False,
    progress: Progress = lambda phase, done: None,
) -> TeacherReport:
    """Store a file of conversations as rows of a run of their own, comparable with rows of the run that learns.

    Rows with the same first user message are a group. The file and the teaching decide all ids: the same import again
    stores nothing, and a changed file is another set.
    """
    check_set_name(name)
    report = TeacherReport()
    chat = _ChatFile(path, teaching, name, report)
    with tempfile.TemporaryFile() as spool:
        chat.render_to(spool, progress)
        import_rows(store, partial(chat.placed, spool), report, source=name, skip_bad=skip_bad, progress=progress)
    return report


class _ChatFile:
    """Reads a file in two passes: conversations become tokens one by one, then groups, which need all their members."""

    def __init__(self, path: Path, teaching: Teaching, name: str, report: TeacherReport) -> None:
        self._path = path
        self._teaching = teaching
        self._report = report
        self._run = _run_of_set(path, teaching, name)
        self._renderer = teaching.model.renderer(AuthorTable.from_json(teaching.run.authors))
        self._members: dict[str, list[tuple[float, bool]]] = defaultdict(list)
        """Reward and success of the members, by task."""

    def render_to(self, spool: IO[bytes], progress: Progress) -> None:
        ignored: Counter[str] = Counter()
        number = 0
        try:
            for number, line in enumerate(lines(self._path), 1):
                try:
                    bundle = self._rendered(read_line(line, ignored), number)
                except ValueError as error:
                    self._report.add_bad(f"{self._path}:{number}", str(error))
                    continue
                spool.write(jsonl.encode(bundle) + b"\n")
                record = bundle.trajectory.record
                self._members[record.task].append((record.reward, record.success))
                progress("check", number)
        except BadRow as error:
            self._report.add_bad(f"{self._path}:{number + 1}", str(error))
        self._report.ignored = dict(ignored)

    def placed(self, spool: IO[bytes]) -> Iterator[Placed]:
        """The rows with their places, their complete groups, and their advantages within them."""
        groups = {task: (group_statistics(found), self._advantages(found)) for task, found in self._members.items()}
        self._report.groups = len(groups)
        self._report.without_signal = sum(one == 0.0 for _, advantages in groups.values() for one in advantages)
        spool.seek(0)
        for line in spool:
            bundle = jsonl.decode(line)
            record = bundle.trajectory.record
            statistics, advantages = groups[record.task]
            row = bundle.with_record(advantage=advantages[record.member])
            yield f"{self._path}:{record.slot + 1}", replace(row, group=replace(bundle.group, **statistics))

    def _advantages(self, members: Sequence[tuple[float, bool]]) -> Sequence[float]:
        if self._teaching.advantage is not None:
            return [self._teaching.advantage] * len(members)
        normalise = (self._setting("algorithm", str) or "grpo") in ("grpo", "ppo")
        return self._teaching.group_advantages([reward for reward, _ in members], normalise)

    def _rendered(self, conversation: Conversation, number: int) -> Bundle:
        reward = self._teaching.reward if conversation.reward is None else conversation.reward
        if reward is None:
            raise BadRow("row must hold a reward, got none. Add one, or give all such rows one with --reward.")
        parser = self._setting("context.parser", str)
        context = record_conversation(
            conversation,
            self._renderer,
            max_tokens=self._setting("context.max_tokens", int) or _ENDLESS,
            parser=PARSERS[parser](conversation.tools) if parser in PARSERS else None,
        )
        self._report.replies += len(conversation.turns)
        task = content_hash({"environment": ENVIRONMENT, "prompt": conversation.task})
        threshold = self._setting("rollout.success_reward", float)
        reached = reward >= (1.0 if threshold is None else threshold)
        called = conversation.turns[-1][0].message.tool_calls
        record = TrajectoryRecord(
            id=_identify(self._run.id, number),
            run=self._run.id,
            group=_identify(self._run.id, task),
            task=task,
            iteration=0,
            slot=number - 1,
            member=len(self._members[task]),
            source=SOURCE,
            reward=reward,
            success=reached if conversation.success is None else conversation.success,
            advantage=0.0,
            stop_reason=str(StopReason.CALLED_LAST if called else StopReason.ANSWERED),
            num_turns=len(conversation.turns),
            num_tool_calls=sum(len(reply.message.tool_calls) for reply, _ in conversation.turns),
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            logprobs_mode="full",
            environment=ENVIRONMENT,
            environment_version="1",
        )
        trajectory = Trajectory(record, context.segments(), context.messages)
        asked = TaskRecord(task, ENVIRONMENT, {"prompt": conversation.task})
        policy = replace(self._teaching.policy, run=self._run.id, version=0, checkpoint=None)
        return Bundle(trajectory, group_of([trajectory]), asked, self._run, (policy,))

    def _setting(self, dotted: str, kind: type[_Value]) -> _Value | None:
        return stored_setting(self._teaching.run.config, dotted, kind)


def _run_of_set(path: Path, teaching: Teaching, name: str) -> RunRecord:
    """The run of a set of conversations. A set is a run of its own, for staleness and resuming concern a run's own
    rows."""
    with opened(path) as raw:
        digest = hashlib.file_digest(raw, "sha256")  # type: ignore[arg-type]  # any stream of bytes will do
    made: dict[str, Any] = {"format": ENVIRONMENT, "name": name, "sha256": digest.hexdigest()}
    made |= {"reward": teaching.reward, "advantage": teaching.advantage, "learner": teaching.run.id}
    id = content_hash(made)[:32]
    return replace(teaching.run, id=id, name=name, config={"import": made})


def _identify(*place: str | int) -> str:
    return hashlib.sha256("/".join(map(str, place)).encode()).hexdigest()[:32]
