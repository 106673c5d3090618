"""A real headless Chromium for tests of pages, and the log of what they ask the network for."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
WIDTHS = {"phone": (390, 844), "desktop": (1280, 900)}


@contextmanager
def chromium(profile: Path, width: str) -> Iterator[object]:
    """A browser with a fresh profile, as wide as a phone or a desktop; skips where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("chromium and chromium-driver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    page = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        columns, rows = WIDTHS[width]
        metrics = {"width": columns, "height": rows, "deviceScaleFactor": 1, "mobile": width == "phone"}
        page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        page.execute_cdp_cmd("Network.enable", {})
        page.get("about:blank")
        page.get_log("performance")  # the browser's own start page is none of ours
        yield page
    finally:
        page.quit()


def requested(page: object) -> list[str]:
    """Every address the page has asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def complaints(page: object) -> list[str]:
    """What the browser's console says: errors of scripts, refused requests."""
    return [entry["message"] for entry in page.get_log("browser")]


def sideways_scroll(page: object) -> int:
    """By how many pixels the page is wider than the window."""
    return page.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")


def full_screenshot(page: object, path: Path) -> None:
    """The whole page as a picture, for somebody to look at."""
    import base64

    shot = page.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "format": "png"})
    path.write_bytes(base64.b64decode(shot["data"]))
