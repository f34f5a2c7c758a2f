"""`/docs` in a real browser: each operation under its API, with an example that works as it
stands."""

import pytest

from hybridtei.server.openapi import EXAMPLES
from tests.server.live import process

expect = pytest.importorskip(
    "playwright.sync_api", reason="the package `playwright` is not installed"
).expect
pytestmark = pytest.mark.slow

KEY = "s3cret"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The embedded model with a store and a key, which collections are exported with."""
    store = tmp_path_factory.mktemp("docs") / "store"
    flags = ["--port", "0", "--hostname", "127.0.0.1", "--qdrant-path", str(store)]
    with process(["-m", "hybridtei", "serve", *flags, "--api-key", KEY]) as running:
        yield running.wait_ready()


def authorize(page):
    page.locator(".auth-wrapper .authorize").click()
    page.get_by_label("auth-bearer-value").fill(KEY)
    page.get_by_role("button", name="Apply credentials").click()
    page.get_by_role("button", name="Close", exact=True).click()


def press(page, path):
    """Try an operation as it stands; return the status that the page shows."""
    operation = page.locator(".opblock", has=page.locator(f'[data-path="{path}"]'))
    operation.locator(".opblock-summary-control").click()
    operation.get_by_role("button", name="Try it out").click()
    operation.get_by_role("button", name="Execute").click()
    status = operation.locator(".live-responses-table .response .response-col_status")
    shown = status.inner_text().split()[0]
    operation.locator(".opblock-summary-control").click()
    return shown


def test_an_example_works_as_it_stands(url, visit):
    with visit(f"{url}/docs/") as page:
        page.locator(".opblock").first.wait_for()
        authorize(page)
        for path in ("/embed", "/collections/{name}/points", "/search"):
            assert press(page, path) == "200", path


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_docs_have_a_section_for_each_api(server, visit, width, scheme):
    paths = server.get("/api-doc/openapi.json").json()["paths"]
    with visit(f"{server.url}/docs/", width=width, color_scheme=scheme) as page:
        page.locator(".opblock").first.wait_for()
        expect(page.locator(".info .title")).to_contain_text("hybridtei")
        sections = page.locator(".opblock-tag-section")
        assert sections.locator("h3").all_inner_texts() == [*EXAMPLES]
        for tag, section in zip(EXAMPLES, sections.all(), strict=True):
            operations = zip(
                section.locator(".opblock-summary-method").all_inner_texts(),
                section.locator("[data-path]").all(),
                strict=True,
            )
            assert {
                (method.lower(), row.get_attribute("data-path")) for method, row in operations
            } == {(method, path) for path in EXAMPLES[tag] for method in paths[path]}
