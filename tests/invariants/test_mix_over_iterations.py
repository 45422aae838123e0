"""The shares of batches are exact to half a row at every moment of a run, whoever collects and however far ahead."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fakes.engine_server import EngineServer, serving
from tests.fakes.made_runs import made_run
from tests.fakes.runs import rows, save_qwen2, small_config

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
