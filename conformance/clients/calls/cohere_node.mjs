// Cohere's SDK for JavaScript, its second version.

import { CohereClientV2 } from "cohere-ai";
import { QUERY, TEXTS, main, ranks, refused, same, server, vectors } from "./harness.mjs";

const client = new CohereClientV2({ token: "-", baseUrl: server.url, maxRetries: 0 });
const embed = (texts) =>
  client.embed({ model: server.embed, texts, inputType: "classification", embeddingTypes: ["float"], truncate: "NONE" });

await main("cohere-ai", {
  async embeddings() {
    const { embeddings } = await embed(TEXTS);
    same(embeddings.float, await vectors());
    return embeddings.float;
  },
  async rerank() {
    const { results } = await client.rerank({ model: server.rerank, query: QUERY, documents: TEXTS });
    same(results.map((result) => [result.index, result.relevanceScore]), await ranks());
  },
  async errors_are_read() {
    await refused(() => embed(["a", ""]), "400", "`texts[1]` cannot be empty");
  },
});
