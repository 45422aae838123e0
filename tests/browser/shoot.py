"""A page as a picture: python -m tests.browser.shoot ADDRESS OUT.png [--width W] [--height H] [--dark] [--full]."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from playwright.sync_api import Browser

from tests.browser.chromium import launched


def shoot(
    browser: Browser,
    address: str,
    out: Path,
    *,
    size: tuple[int, int] = (1280, 800),
    dark: bool = False,
    full: bool = False,
) -> list[str]:
    """Write the picture, once nothing is loading any more; what went wrong on the page, a line each."""
    width, height = size
    troubles: list[str] = []
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        has_touch=width < 600,
    )
    page.on("console", lambda message: troubles.append(f"console {message.type}: {message.text}"))
    page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
    answer = page.goto(address, wait_until="load")
    if answer and answer.status >= 400:
        troubles.append(f"status {answer.status}")
    page.wait_for_load_state("networkidle")
    page.wait_for_function("() => !document.querySelector('[aria-busy=true], .loading')")
    page.wait_for_timeout(200)  # what was fetched last is drawn
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    if wide > 0:
        troubles.append(f"the page is {wide} px wider than the window")
    page.screenshot(path=out, full_page=full)
    page.close()
    return troubles


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.browser.shoot", description="Write a page as a picture.")
    parser.add_argument("address")
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1280, help="of the window, in pixels")
    parser.add_argument("--height", type=int, default=800)
    parser.add_argument("--dark", action="store_true", help="as somebody who prefers dark pages sees it")
    parser.add_argument("--full", action="store_true", help="the whole page, not the window alone")
    given = parser.parse_args()
    with launched() as browser:
        size = (given.width, given.height)
        troubles = shoot(browser, given.address, given.out, size=size, dark=given.dark, full=given.full)
    print("\n".join([f"wrote {given.out}", *troubles]))
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
