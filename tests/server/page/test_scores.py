"""What the page shows of texts, in a real browser: scores, weights, matches and ranks are those of
the API."""

import httpx
import numpy as np
import pytest

from conformance.small import tiny
from hybridtei.retrieval.search.fusion import (
    ZSCORE_WEIGHTS_WITH_MAXSIM,
    normalised,
    scale_of,
)
from tests.inference.engine import small
from tests.near import near
from tests.server.live import process, serving
from tests.server.page.browser import (
    DOCUMENTS,
    QUERY,
    column,
    competition_ranks,
    order,
    score,
    vectors,
    weights,
)

expect = pytest.importorskip(
    "playwright.sync_api", reason="the package `playwright` is not installed"
).expect
pytestmark = pytest.mark.slow


@pytest.fixture
def expected(server):
    """The same from the API, by numpy."""
    (query,), documents = vectors(server, [QUERY], "query"), vectors(server, DOCUMENTS, "passage")
    wanted = weights(query["sparse"])
    alike = [
        np.array(query["multivector"]) @ np.array(document["multivector"]).T
        for document in documents
    ]
    return {
        "dense": [float(np.dot(query["dense"], document["dense"])) for document in documents],
        "sparse": [
            sum(wanted.get(id_, 0) * weight for id_, weight in weights(d["sparse"]).items())
            for d in documents
        ],
        "multivector": [float(matrix.max(axis=1).mean()) for matrix in alike],
        "alike": alike,
        "query": wanted,
        "weights": [weights(document["sparse"]) for document in documents],
    }


def test_query_scores_heat_map_rerank(server, visit, expected):
    with visit(server.url) as page:
        assert page.title() == "hybridtei"
        score(page)
        for kind in ("dense", "sparse", "multivector"):
            assert column(page, kind, len(DOCUMENTS)) == pytest.approx(expected[kind], abs=1e-6)
        columns = {kind: np.array(expected[kind]) for kind in ZSCORE_WEIGHTS_WITH_MAXSIM}
        standardised = sum(
            normalised(values, *scale_of(values), ZSCORE_WEIGHTS_WITH_MAXSIM[kind])
            for kind, values in columns.items()
        )
        assert column(page, "fused", len(DOCUMENTS)) == pytest.approx(standardised, abs=1e-6)
        assert order(page)[0] == int(np.argmax(standardised))
        page.get_by_label("reciprocal ranks").check()
        page.locator('[data-share="sparse"]').fill("1")
        reciprocal = sum(1 / (60 + competition_ranks(values)) for values in columns.values())
        assert column(page, "fused", len(DOCUMENTS)) == pytest.approx(reciprocal)
        assert order(page)[0] == int(np.argmax(reciprocal))

        page.locator('#table tr[data-row="2"] button').focus()
        page.keyboard.press("Enter")
        expect(page.locator('#table tr[data-row="2"]')).to_have_class("selected")
        expect(page.locator('#texts article[data-text="2"]')).to_have_class("selected")
        check_weights(page, server, expected["weights"][2], expected["query"])
        check_heat_map(page, server, expected["alike"][2])

        page.click("#rerank-run")
        expect(page.locator("#ranks li")).to_have_count(len(DOCUMENTS))
        ranking = server.post("/rerank", {"query": QUERY, "texts": DOCUMENTS}).json()
        shown = {
            row: float(page.locator(f'#ranks li[data-row="{row}"]').get_attribute("data-score"))
            for row in range(4)
        }
        assert shown == pytest.approx({rank["index"]: rank["score"] for rank in ranking}, abs=1e-6)
        assert [shown[row] for row in order(page, "#ranks li")] == sorted(
            shown.values(), reverse=True
        )
        check_moves(page, competition_ranks(reciprocal))
        # What was typed is text
        assert page.locator("img, b").count() == 0
        # There is no store
        assert page.locator(".error:visible, #search:visible").count() == 0


def check_weights(page, server, document, query):
    (tokens,) = server.post(
        "/tokenize", {"inputs": [DOCUMENTS[2]], "add_special_tokens": False}
    ).json()
    shown = [token for token in tokens if token["id"] in document]
    marks = page.locator('#texts article[data-text="2"] .spelled mark')
    assert marks.all_inner_texts() == [token["text"] for token in shown]
    found = [float(mark.get_attribute("data-weight")) for mark in marks.all()]
    assert found == pytest.approx([document[token["id"]] for token in shown])
    matched = page.locator('#texts article[data-text="2"] mark.matched').all_inner_texts()
    assert matched == [token["text"] for token in shown if token["id"] in query] != []
    assert page.locator('#texts article[data-text="2"] .spelled').inner_text() == DOCUMENTS[2]


def check_heat_map(page, server, expected):
    def names(text, prompt_name):
        (tokens,) = server.post("/tokenize", {"inputs": [text], "prompt_name": prompt_name}).json()
        # The first has no vector
        return [token["text"] for token in tokens][1:]

    assert page.locator("#heat-map thead th.token").all_inner_texts() == names(
        DOCUMENTS[2], "passage"
    )
    assert page.locator("#heat-map th[scope=row]").all_inner_texts() == names(QUERY, "query")
    cells = [
        float(cell.get_attribute("data-value")) for cell in page.locator("#heat-map td.heat").all()
    ]
    near(np.reshape(cells, expected.shape), expected, 1e-6)
    rows = page.locator("#heat-map tbody tr").all()
    best = [
        [("best" in cell.get_attribute("class")) for cell in row.locator("td.heat").all()].index(
            True
        )
        for row in rows
    ]
    assert best == expected.argmax(axis=1).tolist()


def check_moves(page, fused_ranks):
    for place, row in enumerate(order(page, "#ranks li"), 1):
        by = int(fused_ranks[row]) - place
        words = page.locator(f'#ranks li[data-row="{row}"] .moved').inner_text()
        assert words == ("=" if by == 0 else f"▲ up {by}" if by > 0 else f"▼ down {-by}")


def test_fusion_and_sorting(server, visit, expected):
    with visit(f"{server.url}/m/small/") as page:
        score(page)
        page.get_by_label("weighted scores").check()
        page.locator('[data-share="dense"]').fill("0.5")
        page.locator('[data-share="sparse"]').fill("2")
        page.locator('[data-share="multivector"]').fill("0")
        low, span = min(expected["sparse"]), np.ptp(expected["sparse"])
        sparse = (np.array(expected["sparse"]) - low) / span
        dense = (np.array(expected["dense"]) - min(expected["dense"])) / np.ptp(expected["dense"])
        fused = (0.5 * dense + 2 * sparse) / 2.5
        assert column(page, "fused", len(DOCUMENTS)) == pytest.approx(fused, abs=1e-5)
        bars = page.locator("#table .bar.fused").evaluate_all(
            "all => all.map(bar => Number(bar.style.getPropertyValue('--part')))"
        )
        assert bars == pytest.approx(np.sort((fused - fused.min()) / np.ptp(fused))[::-1], abs=1e-5)
        for kind in ("dense", "multivector"):
            page.click(f'[data-sort="{kind}"]')
            assert order(page) == sorted(range(4), key=lambda row, kind=kind: -expected[kind][row])
            expect(page.locator("th", has=page.locator(f'[data-sort="{kind}"]'))).to_have_attribute(
                "aria-sort", "descending"
            )
            # The heading keeps the focus
            page.keyboard.press("Enter")
            assert order(page) == sorted(range(4), key=lambda row, kind=kind: expected[kind][row])
        page.click('[data-sort="place"]')
        assert order(page) == [0, 1, 2, 3]


def test_what_a_model_lacks_is_grey_and_why(dense_server, visit):
    with visit(dense_server.url, refused=(424,)) as page:
        score(page)
        assert page.locator("#table tbody td.lacking").count() == 2 * len(DOCUMENTS)
        expect(page.locator("#scores-notes")).to_contain_text("Sparse: small has no sparse output.")
        assert page.locator('[data-share="sparse"]').is_disabled()
        assert page.locator('[data-sort="multivector"]').is_disabled()
        assert not page.locator("#text, #heat").locator("visible=true").count()
        page.click("#rerank-run")
        expect(page.locator("#rerank-error")).to_contain_text("small cannot rerank")
        expect(page.locator("#rerank-error")).to_contain_text("424")


def test_terms_that_splade_adds_are_named(splade_server, visit):
    with visit(splade_server.url) as page:
        score(page, ["one two"], "one")
        added = page.locator('#texts article[data-text="0"] .added mark')
        added.first.wait_for()
        asked = {"inputs": ["one two"], "prompt_name": "passage"}
        (entries,), (tokens,) = (
            splade_server.post(path, asked).json() for path in ("/embed_sparse", "/tokenize")
        )
        own = {token["id"] for token in tokens}
        heaviest = sorted((e for e in entries if e["index"] not in own), key=lambda e: -e["value"])[
            : added.count()
        ]
        names = splade_server.post(
            "/decode", {"ids": [[e["index"]] for e in heaviest], "skip_special_tokens": False}
        ).json()
        assert added.all_inner_texts() == [name.strip() for name in names] != []


def test_a_reranker_ranks_without_vectors(reranker, visit):
    with visit(reranker.url) as page:
        score(page, is_refused=True)
        expect(page.locator("#ask-error")).to_contain_text("gives no vectors (reranker)")
        page.click("#rerank-run")
        expect(page.locator("#ranks li")).to_have_count(len(DOCUMENTS))
        assert page.locator("#ranks .moved").count() == 0


def test_many_documents_go_in_parts_and_long_ones_are_cut(visit):
    documents = [*(f"{word} text" for word in small.WORDS), "seven " * 100]
    with serving(server={"max_client_batch_size": 8}) as running, visit(running.url) as page:
        score(page, documents)
        expect(page.locator("#scores-notes")).to_contain_text(
            f"1 texts were cut to {small.LONGEST} tokens."
        )
        (query,) = vectors(running, [QUERY], "query")
        (last,) = vectors(running, documents[-1:], "passage")
        assert column(page, "dense", len(documents))[-1] == pytest.approx(
            np.dot(query["dense"], last["dense"]), abs=1e-6
        )
        page.locator("#table .pick", has_text="seven seven").click()
        expect(page.locator("#heat-map thead th.token")).to_have_count(len(last["multivector"]))
        page.click("#rerank-run")
        expect(page.locator("#ranks li")).to_have_count(len(documents))


def test_several_models_one_embeds_another_ranks(hybrid, visit, tmp_path):
    ranker = tiny.write_classifier(tmp_path / "ranker", "bert")
    flags = [word for folder in (ranker, hybrid) for word in ("--model-id", str(folder))]
    with process(
        ["-m", "hybridtei", "serve", *flags, "--port", "0", "--hostname", "127.0.0.1"]
    ) as running:
        url = running.wait_ready()
        with visit(url) as page, httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            score(page, ["baka bulo", "bomo", "bake balo baka"], "baka")
            assert (page.input_value("#model"), page.input_value("#ranker")) == (
                hybrid.name,
                "ranker",
            )
            page.click("#rerank-run")
            expect(page.locator("#ranks li")).to_have_count(3)
            asked = {"query": "baka", "texts": ["baka bulo", "bomo", "bake balo baka"]}
            ranking = client.post("/m/ranker/rerank", json=asked).json()
            shown = [
                float(row.get_attribute("data-score")) for row in page.locator("#ranks li").all()
            ]
            assert shown == pytest.approx([rank["score"] for rank in ranking], abs=1e-6)
            page.select_option("#model", "ranker")
            expect(page.locator("#scores-notes")).to_contain_text("ranker has no dense output")
            expect(page.locator("#table tbody tr")).to_have_count(0)
