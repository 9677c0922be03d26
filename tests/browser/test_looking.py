"""What one sees, in a real Chromium: MLflow's UI on a store with an A/B, and the report in it and alone.

Screenshots are kept in `screenshots/` of the checkout, which git ignores, or where PARO_SCREENSHOTS says.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from orchestrator import cli, ui
from orchestrator.recorded import catalog
from tests.report import a_store

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PATIENCE_MS = 90_000  # MLflow's pages take seconds, and many on a busy machine
NOT_OURS = re.compile(  # what MLflow's own pages say on their console whatever they show
    r"users/current|AG Grid|GL Driver Message|WebGL|preload|ResizeObserver loop"
)


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    if CHROMIUM is None or sync_playwright is None:
        if "PARO_REQUIRE_BROWSER" in os.environ:
            pytest.fail("there is no Chromium, or no playwright")
        pytest.skip("there is no Chromium (apt-get install chromium), or no playwright")
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu"] if os.geteuid() == 0 else ["--disable-gpu"]
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield running
        running.close()


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        return a_store.fill(tmp_path_factory.mktemp("looking"), patch.setattr)


@pytest.fixture(scope="module")
def ab(store) -> catalog.Entry:
    (found,) = [entry for entry in catalog.entries(store) if entry.is_ab]
    return found


@pytest.fixture(scope="module")
def address(store, browser, tmp_path_factory):
    with ui.running(store, ui.free_port(), tmp_path_factory.mktemp("ui") / "log") as (_, url):
        yield url


@pytest.fixture
def open_page(browser, request):
    """Opens an address; at the end of the test nothing but MLflow's own words may stand on its console."""
    opened, wrong = [], []

    def go(address: str, width: int = 1500, scheme: str = "light"):
        page = browser.new_page(viewport={"width": width, "height": 1000}, color_scheme=scheme)
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda said: wrong.append(f"{said.type}: {said.text} {said.location}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.goto(address)
        opened.append(page)
        return page

    yield go
    for page in opened:
        page.close()
    bad = [line for line in wrong if line.startswith("error") and not NOT_OURS.search(line)]
    assert bad == []


def keep(page, name: str) -> None:
    directory = Path(os.environ.get("PARO_SCREENSHOTS", ROOT / "screenshots"))
    directory.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=directory / f"{name}.png", full_page=True)


def report_of(entry: catalog.Entry) -> str:
    return (entry.artifacts / "report.html").as_uri()


# MLflow's UI


def test_the_links_that_ui_prints_lead_to_the_ab_and_to_its_report(open_page, address, store, ab):
    of_ab, of_report = (line.split()[2] for line in ui.links(store, address)[2:4])
    page = open_page(of_ab)
    page.get_by_text("int4 | int5").first.wait_for()
    page.get_by_text("B is -5.0").first.wait_for()  # the description says why
    keep(page, "mlflow_run")
    page = open_page(of_report)
    inside = page.frame_locator("iframe").first
    inside.get_by_role("heading", name="int5 against int4 on cpu").wait_for()
    assert inside.locator(".verdict strong").inner_text() == "PASS"
    keep(page, "mlflow_report")


def test_the_boots_of_an_ab_are_selected_and_compared(open_page, address, ab):
    page = open_page(f"{address}/#/experiments/{ab.experiment_id}/runs?searchFilter=tags.kind%20%3D%20%27boot%27")
    rows = page.locator("[role=row]")
    rows.filter(has_text="int4 | int5").first.locator("button").first.click()
    for name in ("1.1 b int5", "1.2 a int4"):
        rows.filter(has_text=name).first.get_by_label("toggle row selection").click()
    keep(page, "mlflow_selected")
    page.get_by_role("button", name="Compare", exact=True).first.click()
    page.get_by_text("Comparing 2 Runs").first.wait_for()
    page.locator(".js-plotly-plot").first.wait_for()
    keep(page, "mlflow_compared")


def test_the_boots_curves_are_drawn_against_their_places(open_page, address, store, ab):
    page = open_page(ui.curves_url(address, ab))
    page.locator(".js-plotly-plot .scatterlayer .trace").first.wait_for(state="attached")
    page.wait_for_function("document.querySelectorAll('.js-plotly-plot .scatterlayer .trace').length >= 8")
    keep(page, "mlflow_curves")
    points = page.evaluate(
        "[...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => plot.data.map(line => line.x ?? []))"
    )
    assert [0, 1, 2, 3, 4, 5, 6] in points, "accepted drafts against their positions"
    assert [1, 4] in points, "throughput against requests at once"


# The report


@pytest.mark.parametrize("which", ["ab", "run", "compared"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_has_no_fault_that_axe_finds(open_page, store, ab, which, scheme, capsys):
    from axe_playwright_python.sync_playwright import Axe

    page = open_page(address_of(store, ab, which, capsys), scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    found = Axe().run(page).response["violations"]
    assert [(fault["id"], [node["html"][:200] for node in fault["nodes"][:3]]) for fault in found] == []
    keep(page, f"report_{which}_{scheme}")


@pytest.mark.parametrize("which", ["ab", "run", "compared"])
def test_a_page_is_readable_at_400_pixels(open_page, store, ab, which, capsys):
    page = open_page(address_of(store, ab, which, capsys), width=400)
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400, "only tables scroll sideways, in their own box"
    smallest = page.evaluate(
        "Math.min(...[...document.querySelectorAll('body *')].filter(part => part.innerText && part.offsetParent)"
        ".map(part => parseFloat(getComputedStyle(part).fontSize)))"
    )
    assert smallest >= 12
    for picture in page.locator("img").all():
        assert 300 <= picture.bounding_box()["width"] <= 400
    keep(page, f"report_{which}_400")


def test_nothing_that_a_model_wrote_runs(open_page, ab):
    page = open_page(report_of(ab))
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert page.title() == "PASS: int5 against int4 on cpu"
    assert page.get_by_text("document.title='taken over'").count(), "it is there to be read"


def test_a_page_asks_nothing_of_any_network(browser, ab):
    page, asked = browser.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report_of(ab))
    assert [url for url in asked if not url.startswith(("data:", report_of(ab)))] == []
    page.close()


def test_a_page_prints_whole_with_what_is_folded(browser, ab, tmp_path):
    page = browser.new_page()
    page.goto(report_of(ab))
    page.emulate_media(media="print")
    hidden = page.evaluate(
        "[...document.querySelectorAll('details pre')]"
        ".filter(part => !part.checkVisibility({contentVisibilityAuto: true})).length"
    )
    assert hidden == 0, "a sheet of paper has nothing to click on"
    printed = page.pdf(path=tmp_path / "report.pdf", format="A4")
    assert printed.startswith(b"%PDF") and printed.count(b"/Type /Page\n") + printed.count(b"/Type /Page ") >= 3
    page.close()


def address_of(store: Path, ab: catalog.Entry, which: str, capsys) -> str:
    single = [e for e in catalog.entries(store) if not (e.is_ab or e.parent or e.is_published)]
    if which == "ab":
        return report_of(ab)
    if which == "compared":
        places = [f"paths.tracking={store}", f"paths.state={store.parent}/state", "box=cpu"]
        assert cli.main(["compare", *(entry.run_id for entry in single), *places]) == 0
        return Path(re.search(r"^report: (.+)$", capsys.readouterr().out, re.MULTILINE)[1]).as_uri()
    return report_of(single[0])
