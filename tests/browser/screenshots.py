"""Pictures of every page for the documentation: `make screenshots RUN=runs/quickstart-001`.

Of a run that has replayed; tokens are coloured by drift where `agentloop replay rescore` has scored them.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser

from replay import questions
from replay.pages.addresses import address
from replay.pages.app import create_app
from replay.questions.open_buffer import OpenBuffer, open_buffer
from tests.browser.chromium import launched
from tests.fakes.runs import rows
from tests.replay.pages.serving import served

FOLDER = Path(__file__).parents[2] / "docs" / "images"
PHONE = (390, 844)


@dataclass(frozen=True)
class Shot:
    name: str
    address: str
    size: tuple[int, int] = (1280, 860)
    dark: bool = False


def shots(source: OpenBuffer) -> list[Shot]:
    database = source.store.path
    assert database, "RUN must have its buffer in a file, got one on a server."
    (run,) = rows(database, "select run from iterations group by run order by count(*) desc limit 1")[0]
    mine = f"run = '{run}'"
    replaying = f"""select iteration from draws where {mine} and stream = 'replay'
        group by iteration order by count(*) desc, iteration limit 1"""
    (iteration,) = rows(database, replaying)[0]
    drawn = f"""select t.id, t.task from trajectories t join draws d on d.trajectory = t.id
        left join token_scores s on s.trajectory = t.id where t.{mine} and t.num_tool_calls > 1
        group by t.id, t.task order by count(s.log_probs) > 0 desc, count(distinct d.iteration) desc, t.id limit 1"""
    id, task = rows(database, drawn)[0]
    beside = f"""select id from trajectories where task = '{task}' and id <> '{id}'
        order by num_turns desc, id limit 1"""
    (other,) = rows(database, beside)[0]
    at = _most_drifted(source, id)
    tokens = address("trajectories", id, view="tokens", color="behavior" if at is None else "drift", token=at)
    return [
        Shot("run", address("runs", run)),
        Shot("run-dark", address("runs", run), dark=True),
        Shot("run-phone", address("runs", run), PHONE),
        Shot("buffer", address("buffer", run=run)),
        Shot("buffer-phone", address("buffer", run=run), PHONE),
        Shot("conversation", address("trajectories", id)),
        Shot("tokens", tokens),
        Shot("tokens-dark", tokens, dark=True),
        Shot("updates", address("trajectories", id, view="updates")),
        Shot("iteration", address("runs", run, "iterations", iteration)),
        Shot("task", address("tasks", task)),
        Shot("compare", address("compare", id=[id, other])),
        Shot("mixing", address("mixing", run=run)),
    ]


def _most_drifted(source: OpenBuffer, id: str) -> int | None:
    """The token that the policy has moved furthest away from; None where nothing was scored."""
    drift = questions.tokens(source.store, id, 0)["drift"] or []
    known = {at: abs(math.log(value)) for at, value in enumerate(drift) if value}
    return max(known, key=known.__getitem__, default=None)


def shoot(browser: Browser, address: str, out: Path, shot: Shot) -> Iterator[str]:
    """Write the picture, once nothing is loading any more; what went wrong on the page, a line each."""
    width, height = shot.size
    troubles: list[str] = []
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if shot.dark else "light",
        has_touch=width < 600,
    )
    page.on("console", lambda message: troubles.append(f"console {message.type}: {message.text}"))
    page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
    answer = page.goto(address + shot.address, wait_until="load")
    if answer and answer.status >= 400:
        troubles.append(f"status {answer.status}")
    page.wait_for_load_state("networkidle")
    page.wait_for_function("() => !document.querySelector('[aria-busy=true], .loading')")
    page.wait_for_timeout(200)  # what was fetched last is drawn
    page.screenshot(path=out)
    page.close()
    if importlib.util.find_spec("PIL"):  # 256 colours are enough for a page, and a third of the bytes
        from PIL import Image

        with Image.open(out) as found:
            reduced = found.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        reduced.save(out, optimize=True)
    yield from (f"{shot.name}: {trouble}" for trouble in troubles)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.browser.screenshots", description="Pictures for docs/.")
    parser.add_argument("run", nargs="?", help="run folder; the newest under ./runs when left out")
    given = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    with open_buffer(given.run) as source, served(create_app(source)) as here, launched() as browser:
        troubles = [
            line
            for shot in shots(source)
            for line in shoot(browser, here.address, FOLDER / f"inspector-{shot.name}.png", shot)
        ]
    print("\n".join(troubles))
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
