"""A real browser for tests: Debian's Chromium, driven by playwright. `install_chromium` finds it,
or installs it where that is possible; `WatchedPage` opens pages and collects what no page of ours
may do: a request to another origin, a violation of the content security policy, an error or a
dialog.
"""

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from testbed.waiting import WAIT_S

if TYPE_CHECKING:  # only tests with a browser need playwright
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Route

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INSTALL_S = 600
WAIT_MS = 1000 * WAIT_S  # ends a hang; on a machine whose cores are busy a page takes minutes


class NoBrowser(RuntimeError):
    """No Chromium is there and none could be installed; the message states what to do."""


def install_chromium() -> str:
    """Returns the path of Chromium. A process of root on Debian or Ubuntu installs a missing one;
    raises `NoBrowser` if there is none afterwards.
    """
    if found := _chromium():
        return found
    if os.geteuid() == 0 and shutil.which("apt-get"):
        for line in (["apt-get", "update"], ["apt-get", "install", "-y", "chromium"]):
            environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            subprocess.run(line, env=environment, timeout=INSTALL_S, check=False)
        if found := _chromium():
            return found
    raise NoBrowser(
        "the explorer's tests need Chromium and found none: install Debian's package `chromium` "
        "(apt-get install chromium), or put a Chrome on the PATH"
    )


def _chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def running_browser() -> "Generator[Browser]":
    """A headless Chromium, which ends with the block; it sends nothing of its own."""
    from playwright.sync_api import sync_playwright

    quiet = ["--disable-background-networking", "--disable-component-update", "--no-first-run"]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=install_chromium(),
            args=[*quiet, *(["--no-sandbox"] if os.geteuid() == 0 else [])],
        )
        try:
            yield browser
        finally:
            browser.close()


class WatchedPage:
    """A page that may load from `origin` alone. `faults` collects everything else that it tries,
    every error of its scripts and its console, and every dialog; `check` fails if there are any.
    """

    def __init__(self, browser: "Browser", origin: str, width: int = 1280, dark: bool = False):
        self.origin, self.faults = origin, list[str]()
        self.page: Page = browser.new_page(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
        )
        self.page.set_default_timeout(WAIT_MS)
        self.page.route("**/*", self._route)
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.faults.append(f"script error: {error}"))
        self.page.on("dialog", lambda dialog: self.faults.append(f"dialog: {dialog.message}"))
        self.page.on("popup", lambda popup: self.faults.append(f"window opened: {popup.url}"))

    def open(self, fragment: str = "") -> "Page":
        """Opens a view by its fragment and waits until it shows what it loaded."""
        self.page.goto(f"{self.origin}/{fragment}")
        return self.settled()

    def settled(self) -> "Page":
        """Waits until nothing on the page loads any more."""
        self.page.locator("main h1").first.wait_for()
        self.page.locator(".loading, [aria-busy=true]").first.wait_for(state="detached")
        return self.page

    def picture(self, path: Path, whole: bool = True) -> None:
        """Writes a picture of the page, which is as long as its content if `whole`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(path), full_page=whole)

    def check(self) -> None:
        """Fails with all faults so far."""
        assert not self.faults, "\n".join(self.faults)

    def close(self) -> None:
        self.page.close()

    def _route(self, route: "Route", request: "Request") -> None:
        found = urlsplit(request.url)
        if f"{found.scheme}://{found.netloc}" == self.origin:
            route.continue_()
        else:
            self.faults.append(f"request to another origin: {request.url[:200]}")
            route.abort()

    def _console(self, message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"console {message.type}: {message.text[:400]}")
