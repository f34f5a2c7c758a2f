"""The page's table of current models says what the families compute."""

from conformance.families import published


def test_the_table_is_that_of_the_families():
    assert published.main(["--check"]) == 0


def test_rows_differ_by_what_is_served():
    served = {model.name: published.is_served(model) for model in published.MODELS}
    assert served["google/embeddinggemma-2"]
    assert served["LiquidAI/LFM2.5-ColBERT-350M"]
    assert served["lightonai/SlideOn"]
    assert not served["nvidia/Nemotron-3-Embed-1B-NVFP4"]
