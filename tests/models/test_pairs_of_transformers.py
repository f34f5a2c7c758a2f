"""Rerankers that read pairs as transformers' tokenizer and class do: token types by the tokenizer's
class, blocks by a text alone."""

import json
from itertools import product

import pytest
import torch
from sentence_transformers import CrossEncoder

from conformance.small import tiny, tolerances, vocabulary
from hybridtei.encoder import Encoder
from tests.near import near, scores_of

QUERY, *DOCUMENTS = dict.fromkeys([*vocabulary.texts(7, seed=3), "bulo " * 90])


def alone(folder):
    """Each pair by a model that has read nothing before."""
    scores = []
    for document in DOCUMENTS:
        model = CrossEncoder(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
        scores += model.predict([(QUERY, document)], activation_fn=torch.nn.Identity()).tolist()
    return scores


def check(folder):
    encoder = Encoder.load(folder)
    ranked = encoder.rerank(QUERY, DOCUMENTS, raw_scores=True)
    encoder.close()
    near(scores_of(ranked), alone(folder), tolerances.LOGITS["float32"])


def name_tokenizer(folder, **changes):
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings.pop("model_input_names", None)
    tiny.write_json(file, {**settings, **changes})


NAMED = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
TYPED = ("BertTokenizer", "BertTokenizerFast")


# TokenizersBackend gives BERT no types, and TEI reads those of tokenizer.json.
@pytest.mark.parametrize(
    ("model_type", "tokenizer"),
    [
        *product(("bert", "roformer", "rembert", "ernie"), TYPED),
        ("roformer", "TokenizersBackend"),
        ("rembert", "TokenizersBackend"),
    ],
)
def test_the_class_of_the_tokenizer_gives_token_types(tmp_path, model_type, tokenizer):
    folder = tiny.write_classifier(tmp_path, model_type, type_vocab_size=2)
    name_tokenizer(folder, tokenizer_class=tokenizer)
    check(folder)


@pytest.mark.parametrize("model_type", ["roformer", "ernie"])
def test_the_names_of_inputs_count_first(tmp_path, model_type):
    folder = tiny.write_classifier(tmp_path, model_type, type_vocab_size=2)
    name_tokenizer(folder, tokenizer_class="TokenizersBackend", **NAMED)
    check(folder)


def test_blocks_do_not_depend_on_earlier_texts(tmp_path):
    blocks = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}
    check(tiny.write_classifier(tmp_path, "big_bird", **blocks))
