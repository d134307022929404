"""A real browser on a page: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.errors import UserError
from sluice import start

if TYPE_CHECKING:
    from playwright.sync_api import Dialog, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
START = 60.0  # seconds
LOOK = 0.05  # between two looks
WIDE, NARROW = (1280, 800), (390, 844)


def found() -> str:
    """The browser. Raises UserError, which says what to install."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise UserError(f"needs a browser, one of {', '.join(BROWSERS)}: apt-get install chromium")
    try:
        import playwright  # noqa: F401
    except ImportError:
        raise UserError("needs playwright: pip install playwright") from None
    return browser


def until(page: Page, expression: str) -> None:
    """Wait until the JavaScript `expression` is true there. Playwright's own waiting evaluates a text within the page, which
    its content policy forbids. Raises UserError."""
    for _ in range(int(START / LOOK)):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(1000 * LOOK)
    raise UserError(f"not within {START:g} s: {expression}")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of `sluice page` of a folder."""
    command = start.command("launcher.cli", "page", str(folder))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@contextmanager
def opened(address: str, size: tuple[int, int] = WIDE, dark: bool = False) -> Iterator[tuple[Page, list[str]]]:
    """A page of its own, and the errors that its console has told so far."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found(), args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light")
            faults: list[str] = []

            def refuse(dialog: Dialog) -> None:
                faults.append(f"dialog: {dialog.message}")
                dialog.dismiss()

            page.on("console", lambda told: faults.append(told.text) if told.type == "error" else None)
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on("dialog", refuse)
            page.goto(address)
            yield page, faults
        finally:
            browser.close()
