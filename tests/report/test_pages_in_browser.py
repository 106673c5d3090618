"""The report and the live page as a person sees them: in a real browser, as wide as a phone and as a desktop."""

import threading
import time
from pathlib import Path

import pytest
from browser import chromium, complaints, full_screenshot, requested, sideways_scroll
from builders import random_text
from small_runs import make_run, small_config, three_policies

from fedbandit.report.report import write_report
from fedbandit.report.watch import make_server
from fedbandit.runs.run import run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pages") / "runs"
    three_policies(folder)
    return folder


@pytest.mark.parametrize("width", ["phone", "desktop"])
def test_report_works_offline_from_one_file(runs, tmp_path, width):
    report = write_report([runs], tmp_path / "report.html")
    with chromium(tmp_path / "profile", width) as page:
        page.get(report.as_uri())
        charts = page.find_elements("css selector", "figure svg[role=img]")
        assert len(charts) == 3  # reward, exploration, worst-off clients; no privacy, no held-out data here
        assert len(charts[0].find_elements("css selector", "polyline")) == 4
        assert len(charts[0].find_elements("css selector", "polygon")) >= 3  # bands over two seeds
        assert sideways_scroll(page) == 0
        full_screenshot(page, tmp_path / f"report-{width}.png")

        hide = page.find_element("css selector", ".legend button")
        hide.click()
        assert hide.get_attribute("aria-pressed") == "false"
        assert len(charts[0].find_elements("css selector", "polyline")) == 3

        page.execute_script("arguments[0].focus()", charts[0])
        page.switch_to.active_element.send_keys("\ue012")  # the left arrow key
        said = page.find_element("css selector", ".readout").text
        assert "round" in said
        assert "falcon" in said

        assert [url for url in requested(page) if not url.startswith(("file:", "data:"))] == []
        assert complaints(page) == []


@pytest.mark.parametrize("width", ["phone", "desktop"])
def test_live_page_follows_runs_that_come_and_go(tmp_path, width):
    folder = tmp_path / "runs"
    make_run(folder / "first")
    with make_server(folder) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        with chromium(tmp_path / "profile", width) as page:
            page.get(address)
            _until(lambda: "1 finished" in _state(page))
            assert len(page.find_elements("css selector", "#runs tr")) == 1
            assert len(page.find_elements("css selector", "#reward polyline")) == 1

            run(small_config(policy__beta=0.7), folder / "second", dataset=random_text(), until=5)
            _until(lambda: "1 stopped" in _state(page))
            assert "5 / 12" in page.find_element("css selector", "#runs tr:nth-child(2)").text
            make_run(folder / "second", policy__beta=0.7)
            _until(lambda: "2 finished" in _state(page))
            assert len(page.find_elements("css selector", "#reward polyline")) == 2
            assert sideways_scroll(page) == 0
            full_screenshot(page, tmp_path / f"watch-{width}.png")

            (folder / "second").rename(tmp_path / "elsewhere")
            _until(lambda: "1 finished" in _state(page))
            assert len(page.find_elements("css selector", "#runs tr")) == 1
            assert [url for url in requested(page) if not url.startswith((address, "data:"))] == []
            assert complaints(page) == []
        server.shutdown()
        serving.join()


def _state(page) -> str:
    return page.find_element("id", "state").text


def _until(holds, seconds: float = 60.0) -> None:
    """Wait until something holds; how long that takes is the machine's business."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.2)
