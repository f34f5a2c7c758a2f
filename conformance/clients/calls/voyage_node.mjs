// Voyage's SDK for JavaScript.

import { VoyageAIClient } from "voyageai";
import { QUERY, TEXTS, main, ranks, refused, same, server, vectors } from "./harness.mjs";

const client = new VoyageAIClient({ apiKey: "-", baseUrl: `${server.url}/v1`, maxRetries: 0 });

await main("voyageai", {
  async embeddings() {
    const { data } = await client.embed({ model: server.embed, input: TEXTS });
    const rows = data.map((item) => item.embedding);
    same(rows, await vectors());
    return rows;
  },
  async rerank() {
    const { data } = await client.rerank({ model: server.rerank, query: QUERY, documents: TEXTS });
    same(data.map((result) => [result.index, result.relevanceScore]), await ranks());
  },
  async errors_are_read() {
    const input = ["a", ""];
    await refused(() => client.embed({ model: server.embed, input }), "400", "`input[1]` cannot be empty");
  },
});
