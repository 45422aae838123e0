"""Tries every row of `tasks.data` before anything is collected: the columns that rewards need, and the first prompt."""

from collections.abc import Callable
from dataclasses import dataclass

from agentloop.config import RunConfig
from agentloop.config.sections.context import make_strategy
from agentloop.config.sections.environments import TasksSection, name_environment
from agentloop.environments import EnvironmentFactory, RunEnvironments, Task
from agentloop.environments.datasets import MOST_READ, SIDES, Side, TaskRows
from agentloop.environments.task_source import EnvironmentTasks, TaskSource
from agentloop.errors import UserError
from agentloop.rollouts.actors import make_parser, parsers_by_tools
from agentloop.rollouts.episodes.episode import begin_context
from agentloop.rollouts.rewards import RewardScorer
from context import ContextManager, RenderError
from context.templates.model_files import ModelFiles

_MOST_NAMED = 10


@dataclass(frozen=True)
class RowCheck:
    """Begins each row as an episode does, for which the tokenizer is enough."""

    config: RunConfig
    environments: RunEnvironments
    files: ModelFiles | None
    """The tokenizer and its template; None leaves the prompts unmeasured."""
    scorer: RewardScorer
    note: Callable[[str], None]
    progress: Callable[[int, int], None] = lambda *_: None
    sides: tuple[Side, ...] = SIDES

    def fitting(self, source: TaskSource) -> TaskSource:
        """Leave out long rows if `tasks.too_long` says so. Raises UserError for other rows that no episode can have."""
        found = []
        for part, factory, tasks in zip(self.config.parts, self.environments.all, source.sources, strict=True):
            try:
                found.append(tasks if tasks.rows is None else self._fitting(part.tasks, factory, tasks, tasks.rows))
            except UserError as error:
                raise UserError(name_environment(part.name, str(error))) from error
        return TaskSource(found, may_differ=source.may_differ)

    def _fitting(
        self, section: TasksSection, factory: EnvironmentFactory, tasks: EnvironmentTasks, rows: TaskRows
    ) -> EnvironmentTasks:
        total, skips = sum(len(rows.of(side)) for side in self.sides), section.too_long == "skip"
        places, lengths = dict[Side, list[int]]((side, []) for side in self.sides), []
        files = self.files if factory.agent is None else None  # an agent writes its prompts itself
        measure = None if files is None else self._measured(files, factory)
        reading = tasks.read(sides=self.sides, most=total if skips else MOST_READ)
        for tried, (side, position, task) in enumerate(reading, 1):
            try:
                self.scorer.check(task)
                tokens = 0 if measure is None else measure(task)
            except (UserError, RenderError) as error:
                raise UserError(f"tasks.data, {rows.place(side, position)}: {error}") from error
            if tokens >= self.config.context.max_tokens:
                places[side].append(position)
                lengths.append(tokens)
            self.progress(tried, total)
        if tried < total:
            self.note(f"tasks: {tried:,} of {total:,} rows were tried; the others are read when they come")
        if not lengths:
            return tasks
        named = [rows.place(side, position) for side, found in places.items() for position in found]
        found = f"{len(named):,} of {total:,} rows too long: {', '.join(named[:_MOST_NAMED])}"
        found += f" and {len(named) - _MOST_NAMED:,} more" * (len(named) > _MOST_NAMED)
        empties = any(len(found) == len(rows.of(side)) for side, found in places.items())
        if empties or not skips:
            raise UserError(
                "tasks.data must hold rows whose first prompt leaves room for a reply within context.max_tokens="
                f"{self.config.context.max_tokens}, got {found}. Set context.max_tokens above {max(lengths)}, shorten "
                f"these rows{'' if empties else ', or leave them out with tasks.too_long: skip'}."
            )
        self.note(f"tasks: left out {found}")
        return tasks.without(places)

    def _measured(self, files: ModelFiles, factory: EnvironmentFactory) -> Callable[[Task], int]:
        """Make a function that counts the tokens of a task's first prompt. It raises UserError or RenderError."""
        section, template = self.config.context, files.template
        renderer = files.renderer(section.author_table(), allow_hidden=section.allow_hidden_tools)
        parser = make_parser(section.parser, template, tools=self.environments.tools)
        parsers, strategy = parsers_by_tools(section, template), make_strategy(section.strategy, section.options)

        def measure(task: Task) -> int:
            own = parser if task.tools is None else parsers(task.tools)
            context = ContextManager(renderer, own, max_tokens=section.max_tokens, strategy=strategy)
            begin_context(context, task, factory.tools_for(task), asked_by=factory.where)
            return len(context.prompt_ids)

        return measure
