"""The shares of batches are exact to half a row at every moment of a run, whoever collects and however far ahead."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agentloop.training.train import train
from tests.fakes.engine_server import EngineServer, serving
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.made_runs import made_run
from tests.fakes.runs import SilentDisplay, rows, save_qwen2, small_config

ITERATIONS = 100
pytestmark = pytest.mark.timeout(300)
FIRST = 6
"""The batch from which on rows are replayed: whatever is planned ahead, the buffer has enough for it by then."""
CONSTANT: dict[str, Any] = {"fraction": 0.23}
FALLING: dict[str, Any] = {"fraction": 0.47, "schedule": {"shape": "linear", "final": 0.11}}
BATCHES = """select fraction, fresh, replay,
             (select count(*) from draws d where d.iteration = i.iteration and d.stream = 'fresh'),
             (select count(*) from draws d where d.iteration = i.iteration and d.stream = 'replay')
             from iterations i order by iteration"""


class Batch(NamedTuple):
    """What an iteration says of its batch, and what its draws say."""

    fraction: float
    fresh: int
    replay: int
    drawn_fresh: int
    drawn_replay: int


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    with serving(save_qwen2(tmp_path_factory.mktemp("model"))) as server:
        yield server


def by_workers(server: EngineServer, staleness: int, samples_per_insert: float | None) -> dict[str, dict[str, Any]]:
    return {
        "rollout": {"engine": "vllm"},
        "engine": {"urls": [server.address]},
        "loss": {"fresh": {"anchor": "behavior"}},
        "collection": {"by": "workers", "max_staleness": staleness, "samples_per_insert": samples_per_insert},
    }


MODES = [(None, None), (0, None), (1, None), (3, None), (1, 40.0), (3, 40.0), (3, 1.5)]
"""The bound on staleness and `samples_per_insert`; without the first one the loop collects."""
QUICK = (3, 1.5, FALLING)


@pytest.mark.parametrize(
    ("staleness", "samples_per_insert", "replay"),
    [
        pytest.param(*mode, replay, marks=() if (*mode, replay) == QUICK else pytest.mark.soak)
        for mode in MODES
        for replay in (CONSTANT, FALLING)
    ],
)
def test_every_mode_replays_the_declared_share(
    tmp_path: Path,
    server: EngineServer,
    staleness: int | None,
    samples_per_insert: float | None,
    replay: dict[str, Any],
) -> None:
    """Batches of replayed rows alone are extra: what the mixed ones carry over is not changed by them."""
    config = small_config(
        tmp_path,
        server.models.folder,
        run={"iterations": ITERATIONS},
        replay={**replay, "start": {"iteration": FIRST}},
        **({} if staleness is None else by_workers(server, staleness, samples_per_insert)),
    )
    with made_run(config) as run:
        for _ in range(ITERATIONS):
            batches = run.loop.state.batches
            run.iterate()
            if samples_per_insert is not None and run.loop.state.batches == batches:
                assert run.samples <= samples_per_insert * run.counts.done
        counts = run.counts
    found = [Batch(*row) for row in rows(tmp_path / "small-001" / "replay.sqlite", BATCHES)]
    alone = [batch for batch in found if not batch.fresh]
    mixed = [batch for batch in found if batch.fresh]
    assert (len(alone) > 0) == (samples_per_insert is not None)
    assert all(batch.replay == batch.drawn_replay == 16 for batch in alone)
    off = [Fraction(0)]
    for number, batch in enumerate(mixed, start=1):
        assert (batch.fresh, batch.replay, batch.fresh + batch.replay) == (batch.drawn_fresh, batch.drawn_replay, 16)
        if batch.replay or number >= FIRST:
            off.append(off[-1] + 16 * Fraction(batch.fraction) - batch.replay)
    worst = max(map(abs, off))
    print(f"{len(mixed)} mixed and {len(alone)} replayed batches: at most {float(worst):.3f} rows off")
    assert sum(batch.replay for batch in mixed) > 100
    assert worst <= Fraction(1, 2)
    if staleness is not None:
        collected = (counts.queued, counts.leased, counts.open, counts.waiting, counts.late, counts.unused)
        assert (collected, counts.fresh) == ((0,) * 6, counts.done)
    assert mixed[-1].fraction == pytest.approx(config.mix_rule().fraction_at(ITERATIONS), abs=0.03)


@pytest.mark.soak
def test_the_share_of_hindsight_is_exact_too(tmp_path: Path, server: EngineServer) -> None:
    """Of a run that is real: what failed episodes solved is two fifths of what is replayed."""
    replay = {
        "fraction": 0.37,
        "sources": {"hindsight": 0.4, "self": 0.6},
        "shortfall": "error",
        "hindsight": {"enable": True, "min_turns": 1, "window": 20},
        "start": {"iteration": FIRST},
    }
    config = small_config(
        tmp_path,
        server.models.folder,
        run={"iterations": ITERATIONS},
        environment={"name": f"{ENVIRONMENTS / 'goals.py'}:Remainder"},
        rollout={"max_turns": 1},
        replay=replay,
        evaluation={"every": 0, "tasks": 8},
        checkpoint={"every": ITERATIONS, "keep_policies": "none"},
    )
    database = train(config, display=SilentDisplay()).folder / "replay.sqlite"
    query = """select d.iteration, count(*), sum(t.source = 'hindsight') from draws d join trajectories t
               on t.id = d.trajectory where d.stream = 'replay' group by d.iteration order by d.iteration"""
    replayed, of_hindsight = Fraction(0), Fraction(0)
    worst = Fraction(0)
    found = rows(database, query)
    for _, drawn, hindsight in found:
        replayed += Fraction(37, 100) * 16 - drawn
        of_hindsight += Fraction(4, 10) * drawn - hindsight
        worst = max(worst, abs(replayed), abs(of_hindsight))
    print(
        f"{len(found)} batches with {sum(row[2] for row in found)} rows of hindsight: at most {float(worst)} rows off"
    )
    assert [iteration for iteration, _, _ in found] == list(range(FIRST, ITERATIONS + 1))
    assert worst <= Fraction(1, 2)
