"""The report and the live page as a person sees them: in a real browser, as wide as a phone and as a desktop."""

import threading
import time
from pathlib import Path

import pytest
from browser import (
    chromium,
    clipped,
    complaints,
    contrast,
    dark,
    full_screenshot,
    requested,
    sideways_scroll,
)
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
        assert (
            len(charts) == 3
        )  # reward, exploration, worst-off clients; no privacy, no held-out data here
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


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """Ten configurations with long labels: two rates that differ beside the policy's own parameter."""
    folder = tmp_path_factory.mktemp("many") / "runs"
    for number in range(10):
        rates = {
            "client__learning_rate": 0.1 + number % 2 / 10,
            "server__learning_rate": 0.01 + number % 3 / 100,
        }
        make_run(folder / f"run-{number}", policy__beta=0.1 + number // 6 / 100, rounds=6, **rates)
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", ["phone", "desktop"])
def test_a_report_tells_who_won_on_its_first_screen_and_clips_nothing(
    many, tmp_path, width, scheme
):
    report = write_report([many], tmp_path / "report.html")
    with chromium(tmp_path / "profile", width) as page:
        dark(page, scheme == "dark")
        page.get(report.as_uri())
        box = page.execute_script(
            "const b = document.querySelector('.headline').getBoundingClientRect(); return b.bottom"
        )
        assert box < page.execute_script("return innerHeight")
        assert clipped(page) == []
        assert sideways_scroll(page) == 0
        axis = page.find_elements(
            "css selector", "figure:first-of-type .axis text[text-anchor=end]"
        )
        assert len(axis) >= 4  # three values and the name of the axis below
        paper = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(22, 24, 28)" if scheme == "dark" else "rgb(255, 255, 255)")
        assert contrast(page, "body, .soft, h1, td") > 4.5
        assert contrast(page, "figure:first-of-type .line, th .line") > 3
        full_screenshot(page, tmp_path / f"report-{width}-{scheme}.png")

        first = page.find_element("css selector", "#running_reward")
        assert len(first.find_elements("css selector", "polyline")) == 8
        hidden = first.find_elements("css selector", "option")[1].get_attribute("value")
        picker = first.find_element("css selector", "select")
        pick = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change'))"
        page.execute_script(pick, picker, hidden)
        assert hidden in [
            button.text for button in first.find_elements("css selector", ".legend button")
        ]
        assert len(first.find_elements("css selector", "polyline")) == 8
        assert complaints(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", ["phone", "desktop"])
def test_the_live_page_sorts_filters_and_compares(many, tmp_path, width, scheme):
    with make_server(many) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        with chromium(tmp_path / "profile", width) as page:
            dark(page, scheme == "dark")
            page.get(f"http://127.0.0.1:{server.server_address[1]}/")
            _until(lambda: "10 finished" in _state(page))
            assert len(page.find_elements("css selector", "#reward polyline")) == 8
            assert contrast(page, "body, .soft, td") > 4.5
            assert contrast(page, "#reward .line") > 3

            order = "const o = document.getElementById('order'); o.value = 'running'; o.dispatchEvent(new Event('change'))"
            page.execute_script(order)
            shown = [
                float(cell.text.split("\n")[-1])
                for cell in page.find_elements("css selector", "#runs td:nth-child(6)")
            ]
            assert shown == sorted(shown, reverse=True)
            assert (
                page.execute_script("return document.querySelector('[aria-sort]').ariaSort")
                == "descending"
            )

            search = page.find_element("id", "search")
            search.send_keys("policy.beta=0.11")
            assert len(page.find_elements("css selector", "#runs tr")) == 4
            search.clear()
            search.send_keys("clients_per_round= run-7")
            assert [
                row.text.split("\n")[0].split(" ")[0]
                for row in page.find_elements("css selector", "#runs tr")
            ] == ["run-7"]
            page.execute_script("document.querySelector('#search').value = ''")
            search.send_keys(" ")

            for name in ("run-1", "run-8"):
                box = page.find_element("xpath", f"//label[normalize-space()='{name}']/input")
                page.execute_script("arguments[0].click()", box)
            _until(lambda: len(page.find_elements("css selector", "#compared-runs tr")) == 2)
            assert len(page.find_elements("css selector", "#reward polyline")) == 2
            assert "policy.\u200bbeta" in page.find_element("id", "compared-heads").get_attribute(
                "textContent"
            )
            assert clipped(page) == []
            assert sideways_scroll(page) == 0
            full_screenshot(page, tmp_path / f"watch-{width}-{scheme}.png")
            page.execute_script("document.getElementById('forget').click()")
            _until(lambda: len(page.find_elements("css selector", "#reward polyline")) == 8)
            assert complaints(page) == []
        server.shutdown()
        serving.join()
