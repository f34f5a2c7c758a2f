"""What a language model of transformers says of a query and documents."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conformance.small.vocabulary import LONGEST


def logits_of(folder, template, query, documents, **fields):
    """Logits [documents, words] of the template's `yes` and, if it has one, `no`. The body is cut;
    prefix and suffix are put around its ids."""
    words = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    before, body, after = (template[key] for key in ("prefix", "body", "suffix"))
    before, after = (words(part, add_special_tokens=False)["input_ids"] for part in (before, after))
    judged = [template[key] for key in ("yes", "no") if template[key] is not None]
    rows = []
    for document in documents:
        text = body.format(query=query, document=document, **fields)
        ids = words(text, add_special_tokens=False)["input_ids"]
        ids = [*before, *ids[: LONGEST - len(before) - len(after)], *after]
        with torch.inference_mode():
            last = model(input_ids=torch.tensor([ids])).logits[0, -1].double()
        rows.append(last[words.convert_tokens_to_ids(judged)].numpy())
    return np.stack(rows)
