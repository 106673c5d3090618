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
        metrics = {
            "width": columns,
            "height": rows,
            "deviceScaleFactor": 1,
            "mobile": width == "phone",
        }
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
    return [
        m["params"]["request"]["url"]
        for m in messages
        if m["method"] == "Network.requestWillBeSent"
    ]


def complaints(page: object) -> list[str]:
    """What the browser's console says: errors of scripts, refused requests."""
    return [entry["message"] for entry in page.get_log("browser")]


def sideways_scroll(page: object) -> int:
    """By how many pixels the page is wider than the window."""
    return page.execute_script(
        "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )


def dark(page: object, wanted: bool = True) -> None:
    """Have the page think that its reader prefers dark pages, or light ones."""
    scheme = {"name": "prefers-color-scheme", "value": "dark" if wanted else "light"}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def clipped(page: object) -> list[str]:
    """The texts of visible cells that lie in part outside of the window."""
    return page.execute_script(
        "return [...document.querySelectorAll('td, th')].filter(c => c.offsetParent !== null && c.clientHeight > 1 &&"
        " c.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map(c => c.textContent)"
    )


def contrast(page: object, selector: str) -> float:
    """By how much what the selector finds stands out from the page's paper: the ratio that WCAG defines."""
    return page.execute_script(
        """
        const luminance = (text) => {
          const canvas = new OffscreenCanvas(1, 1).getContext("2d");
          canvas.fillStyle = text;
          canvas.fillRect(0, 0, 1, 1);
          const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((v) => v / 255)
            .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
          return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const found = [...document.querySelectorAll(arguments[0])].map((element) => getComputedStyle(element));
        const own = found.map((style) => luminance(style.stroke !== "none" ? style.stroke : style.color));
        const paper = luminance(getComputedStyle(document.body).backgroundColor);
        return Math.min(...own.map((one) => (Math.max(one, paper) + 0.05) / (Math.min(one, paper) + 0.05)));
        """,
        selector,
    )


def full_screenshot(page: object, path: Path) -> None:
    """The whole page as a picture, for somebody to look at."""
    import base64

    shot = page.execute_cdp_cmd(
        "Page.captureScreenshot", {"captureBeyondViewport": True, "format": "png"}
    )
    path.write_bytes(base64.b64decode(shot["data"]))
