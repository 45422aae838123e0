"""Pictures of every page of the inspector for the documentation: `make screenshots RUN=runs/quickstart-001`.

Of a run that has replayed; tokens are coloured by drift, which `agentloop replay rescore` measures.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser

from replay.open_buffer import open_buffer
from replay.pages.addresses import address
from replay.pages.app import create_app
from tests.browser.executable import launched
from tests.fakes.runs import rows
from tests.replay.pages.serving import served

FOLDER = Path(__file__).parent / "images"
DARK, PHONE = {"run", "tokens"}, {"run", "buffer"}
"""Pages of which there is a second picture."""


def pages(database: Path) -> dict[str, str]:
    """Addresses by the name of the picture."""
    (run,) = rows(database, "select run from iterations group by run order by count(*) desc limit 1")[0]
    replaying = f"""select iteration from draws where run = '{run}' and stream = 'replay'
        group by iteration order by count(*) desc, iteration limit 1"""
    (iteration,) = rows(database, replaying)[0]
    drawn = f"""select t.id, t.task from trajectories t join draws d on d.trajectory = t.id
        left join token_scores s on s.trajectory = t.id where t.run = '{run}' and t.num_tool_calls > 1
        group by t.id, t.task order by count(s.log_probs) > 0 desc, count(distinct d.iteration) desc, t.id limit 1"""
    id, task = rows(database, drawn)[0]
    return {
        "run": address("runs", run),
        "buffer": address("buffer", run=run),
        "conversation": address("trajectories", id),
        "tokens": address("trajectories", id, view="tokens", color="drift"),
        "updates": address("trajectories", id, view="updates"),
        "iteration": address("runs", run, "iterations", iteration),
        "task": address("tasks", task),
        "mixing": address("mixing", run=run),
    }


def shoot(browser: Browser, address: str, name: str, *, dark: bool = False, phone: bool = False) -> Iterator[str]:
    """Write a picture, once nothing is loading any more; what went wrong on the page, a line each."""
    width, height = (390, 844) if phone else (1280, 860)
    troubles: list[str] = []
    scheme = "dark" if dark else "light"
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=phone)
    page.on("console", lambda message: troubles.append(f"console {message.type}: {message.text}"))
    page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
    page.goto(address, wait_until="load")
    page.wait_for_load_state("networkidle")
    page.wait_for_function("() => !document.querySelector('[aria-busy=true], .loading')")
    page.wait_for_timeout(200)  # what was fetched last is drawn
    out = FOLDER / f"inspector-{name}{'-dark' * dark}{'-phone' * phone}.png"
    page.screenshot(path=out)
    page.close()
    yield from (f"{out.name}: {trouble}" for trouble in troubles)


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    troubles: list[str] = []
    with (
        open_buffer(next(iter(sys.argv[1:]), None)) as source,
        served(create_app(source)) as here,
        launched() as browser,
    ):
        assert source.store.path, "RUN must have its buffer in a file, got one on a server."
        for name, target in pages(source.store.path).items():
            troubles += shoot(browser, here.address + target, name)
            if name in DARK:
                troubles += shoot(browser, here.address + target, name, dark=True)
            if name in PHONE:
                troubles += shoot(browser, here.address + target, name, phone=True)
    print("\n".join(troubles))
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
