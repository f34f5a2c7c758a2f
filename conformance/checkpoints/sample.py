"""The cases that CI runs on every engine, and the ones that are known to be served wrong."""

# The first case of each group, every 48th of all, and late interaction, whose queries have tokens
# that no other attends to.
SAMPLE = (
    "fam-bert",
    "fam-eurobert",
    "fam-data2vec-text",
    "cfg-bert-act-gelu",
    "cfg-nomic-act-silu",
    "cfg-modernbert-old-config-thetas",
    "cfg-ropeold-qwen3-yarn-mscale-type",
    "cfg-ropeold-mistral-linear-type",
    "cfg-rope-missing-nomic",
    "tok-vocab-txt-only",
    "tok-config-no-chinese",
    "tok-decoder-no-pad",
    "author-llama-json10-config",
    "prompt-named",
    "st6-qwen3-prompts",
    "length-modernbert-sbert-above-config",
    "x-decoder-no-pad-hf",
    "pool-max",
    "pool-lstm",
    "pool-truncate-dim",
    "mod-pooling-elsewhere",
    "w-fp16",
    "w-only-tf",
    "ce-bert",
    "cls3-bert",
    "ce-eurobert",
    "tag-bert",
    "tag-albert",
    "h-bert-for-QuestionAnswering",
    "splade-plain-bert",
    "late-pylate",
    "late-pylate-attend",
    "late-pylate-xlmr",
    "late-stanford-attend",
    "static-st6",
    "m3-pt",
    "lm-ranker-qwen3-st6",
    "shape-jina-reranker-v2",
    "remote-code-untrusted",
)

# The cases of the sample that run on OpenVINO too: a kind of attention, position, head or output
# each.
COMPILED = (
    "fam-bert",
    "cfg-modernbert-old-config-thetas",
    "cfg-ropeold-qwen3-yarn-mscale-type",
    "pool-max",
    "w-fp16",
    "ce-bert",
    "cls3-bert",
    "tag-bert",
    "splade-plain-bert",
    "late-pylate",
    "late-pylate-attend",
    "m3-pt",
    "lm-ranker-qwen3-st6",
)

# (case, engine) -> what is wrong. The list may only shrink: a case that is here and is not wrong
# fails, until it is removed.
KNOWN: dict[tuple[str, str], str] = {}
