// Vercel's AI SDK, with its provider for servers of OpenAI's API.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, embedMany } from "ai";
import { TEXTS, main, refused, same, server, vectors } from "./harness.mjs";

const provider = createOpenAICompatible({ name: "hybridtei", baseURL: `${server.url}/v1`, apiKey: "-" });
const model = provider.embeddingModel(server.embed);

await main("ai", {
  async embeddings() {
    const { embeddings } = await embedMany({ model, values: TEXTS });
    same(embeddings, await vectors());
    return embeddings;
  },
  async embeddings_of_one_text() {
    const { embedding } = await embed({ model, value: TEXTS[0] });
    same(embedding, (await vectors(TEXTS.slice(0, 1)))[0]);
  },
  async batch_above_teis_limit() {
    const { embeddings } = await embedMany({ model, values: Array(100).fill("bo") });
    same(embeddings[99], (await vectors(["bo"]))[0]);
  },
  async errors_are_read() {
    await refused(() => embedMany({ model, values: ["a", ""], maxRetries: 0 }), "`input[1]` cannot be empty");
  },
});
