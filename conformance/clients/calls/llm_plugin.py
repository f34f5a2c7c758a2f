"""llm with its plugin for Ollama, which takes names of one digest for one model."""

from __future__ import annotations

import json
import os
import sys
import tempfile

from harness import TEXTS, Server, call, main, same

# Read when the plugin is loaded
with open(sys.argv[1], encoding="utf-8") as _file:
    os.environ["OLLAMA_HOST"] = json.load(_file)["url"]
os.environ["LLM_USER_PATH"] = tempfile.mkdtemp()

import llm


@call
def each_side_of_a_model_is_its_own_model(server: Server) -> None:
    prompts = server.ask("/info", alias=server.embed)["hybridtei"]["prompts"]
    for side, prompt in (("", None), (":query", "query"), (":document", "passage")):
        model = llm.get_embedding_model(f"ollama/{server.embed}{side}")
        found = [*model.embed_multi(TEXTS)]
        same(found, server.vectors(prompt_name=prompt if prompt in prompts else None))


@call
def rerankers_are_not_among_them(server: Server) -> None:
    names = [found.model.model_id for found in llm.get_embedding_models_with_aliases()]
    assert f"ollama/{server.embed}" in names
    assert f"ollama/{server.rerank}" not in names, names


main("llm-ollama", "llm-ollama")
