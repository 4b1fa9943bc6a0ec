"""A headless Chromium driven by playwright: the machine's own browser, or the one that `playwright install` downloaded.

Used by the tests of the web page and by `script/screenshots.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright
from playwright.sync_api import Error as PlaywrightError

NAMES = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser")
"""Names of browsers to try. script/setup.sh --dev has them too and installs the first one."""
FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
"""Flags of the browser. Playwright adds --headless, --no-sandbox and an empty profile that it removes at the end."""


class NoBrowser(Exception):
    """No Chromium on this machine starts; the message lists what was tried."""


def candidates() -> list[str | None]:
    """Return the executables to try, in this order; None is playwright's own download. `CHROMIUM=path` replaces them
    all."""
    if chosen := os.environ.get("CHROMIUM"):
        return [chosen]
    return [*(path for name in NAMES if (path := shutil.which(name))), None]


@contextmanager
def headless_browser() -> Iterator[Browser]:
    """Yield one browser process; raise NoBrowser if none starts."""
    with sync_playwright() as playwright:
        failures = []
        for path in candidates():
            try:
                browser = playwright.chromium.launch(executable_path=path, args=FLAGS, timeout=30_000)
            except PlaywrightError as error:
                failures.append(f"{path or 'playwright install chromium'}: {error.message.strip().splitlines()[0]}")
                continue
            try:
                yield browser
            finally:
                browser.close()
            return
        raise NoBrowser(
            "no Chromium starts here; script/setup.sh --dev says how to get one. Tried " + "; ".join(failures)
        )
