"""What an application opens before it forks, for `test_forks.py`: gunicorn and Celery import this
module in the parent."""

import asyncio
import json
import os

from hybridtei import Client, Encoder, HybridSparseEmbeddings, Index

TEXTS = ["baka bulo", "duna bero", "bona bake"]
PARENT = os.getpid()
encoder = Encoder.load(os.environ["MODEL"])
in_memory = Index(TEXTS, encoder, show_progress=False)
opened = Index.open(os.environ["FOLDER"], encoder=encoder)
client = Client(os.environ["URL"])
by_url = HybridSparseEmbeddings(os.environ["URL"])


def answers():
    """One call of each, as JSON."""
    return {
        "one": encoder.encode("baka").dense.tolist(),
        "many": encoder.encode(TEXTS, ("dense", "sparse")).dense.tolist(),
        "awaited": asyncio.run(encoder.aencode(TEXTS)).dense.tolist(),
        "in memory": in_memory.search("bulo")[0].payload["text"],
        "opened": opened.search("bulo")[0].payload["text"],
        "client": client.encode("one", input_type="query").dense.tolist(),
        "by url": by_url.embed_query("one").values,
    }


# The threads and connections of these calls stay in the parent
EXPECTED = answers()


def is_same(*_):
    """True in a forked process where all calls answer as in the parent."""
    return os.getpid() != PARENT and answers() == EXPECTED


def application(environ, start_response):
    """WSGI."""
    body = json.dumps([is_same(), os.getpid()]).encode()
    start_response("200 OK", [("content-length", str(len(body)))])
    return [body]
