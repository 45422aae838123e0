"""A number is the same in `replay stats`, on pages, in frames and in SQL, also of a run that was resumed."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import replay
from replay import ReplayStore, questions
from replay.exchange import export_file, import_file
from replay.pages.report import tile_series, tiles
from replay.questions.outcomes import outcomes
from replay.questions.table_series import TABLE_SERIES, table_series
from tests.fakes.engine_server import serving
from tests.fakes.runs import small_config
from tests.fakes.worker_runs import made_run


def resume_run(folder: Path, model: Path, **sections: Any) -> Path:
    """Six iterations, the last three of which are made again after a resume."""
    made = small_config(folder, model, run={"iterations": 6}, replay={"fraction": 0.25}, **sections)
    with made_run(made) as run:
        for iteration in range(1, 7):
            run.iterate()
            if iteration == 3:
                checkpoint = run.checkpoint()
        run.resume(checkpoint)
        for _ in range(3):
            run.iterate()
        run.loop.collection.end_run()
    return folder / "small-001"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("by", ["loop", "workers"])
def test_numbers_of_a_resumed_run_are_equal_wherever_they_are_asked_for(tmp_path: Path, qwen2: Path, by: str) -> None:
    with serving(qwen2) as server:
        workers = {"rollout": {"engine": "vllm"}, "engine": {"urls": [server.address]}, "collection": {"by": by}}
        folder = resume_run(tmp_path, qwen2, **(workers if by == "workers" else {}))
    with closing(ReplayStore.open(folder / "replay.sqlite")) as store, replay.open(folder) as frames:
        run = store.run().id
        stats, counted = questions.summary(store, run), outcomes(store, run)["episodes"]
        series, progress = table_series(store, run, TABLE_SERIES), questions.progress(store, store.run(), folder)

        def ask(query: str) -> Any:
            (row,) = frames.sql(query).to_arrow().to_pylist()
            return tuple(row.values())

        assert ask("select count(*), sum(without_signal) from v_groups") == (
            stats["groups"],
            stats["groups_without_signal"],
        )
        assert stats["groups"] == len(frames.groups().to_arrow()) == sum(n for _, n in series["groups/collected"]) > 0
        assert stats["tasks"] == ask("select count(*) from v_tasks")[0] == questions.task_list(store, run)["tasks"]
        episodes = "select count(*), sum(success) from v_trajectories where state <> 'orphaned'"
        assert (
            ask(episodes) == (stats["episodes"], stats["successes"]) == (sum(counted.values()), counted["successful"])
        )
        undone = stats["trajectories"] - stats["episodes"]
        assert undone == ask("select count(*) from v_trajectories where state = 'orphaned'")[0]
        assert (undone > 0) == (by == "loop")  # the next batches use what workers had collected
        batches = (stats["draws"]["fresh"], stats["draws"]["replay"])
        assert ask("select sum(fresh), sum(replay) from v_iterations") == batches
        assert (
            ask("select sum(stream = 'fresh'), sum(stream = 'replay') from v_draws where state <> 'reserved'")
            == batches
        )
        assert batches == tuple(sum(n for _, n in series[f"batch/{stream}"]) for stream in ("fresh", "replay"))
        (_, rows, _, *_) = tiles(tile_series(store, run), store.run().config)
        assert (rows.words[0][0], rows.words[2][0]) == (f"{batches[0]}", f"+ {batches[1]}")
        flat = stats["groups_without_signal"] / stats["groups"]
        assert f"{100 * flat:.1f} % of {stats['groups']:,}" in dict(rows.facts)["groups without signal"]
        assert ask("select avg(staleness) from v_draws where stream = 'replay'")[0] == stats["draws"]["staleness_mean"]
        assert (ask("select ended from v_runs")[0], progress["state"]) == (1, "finished")

        # An export and its import have the same numbers.
        export_file(store, tmp_path / "rows.jsonl")
        with closing(ReplayStore.create(tmp_path / "imported.sqlite")) as imported:
            import_file(imported, tmp_path / "rows.jsonl", name=None)
            again = questions.summary(imported, run)
        assert [again[name] for name in ("groups", "episodes", "successes", "staleness")] == [
            stats[name] for name in ("groups", "episodes", "successes", "staleness")
        ]
