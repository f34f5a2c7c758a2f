// Ollama's client for JavaScript.

import { Ollama } from "ollama";
import { TEXTS, main, refused, same, server, vectors } from "./harness.mjs";

const client = new Ollama({ host: server.url });

await main("ollama", {
  async embeddings() {
    const { embeddings } = await client.embed({ model: server.embed, input: TEXTS });
    same(embeddings, await vectors());
    return embeddings;
  },
  async embeddings_of_a_prompt() {
    const { embedding } = await client.embeddings({ model: server.embed, prompt: TEXTS[0] });
    same(embedding, (await vectors(TEXTS.slice(0, 1), { normalize: false }))[0]);
  },
  async models_are_listed() {
    const { models } = await client.list();
    if (!models.length) throw new Error("no models");
  },
  async errors_are_read() {
    await refused(() => client.embed({ model: server.embed, input: ["a", ""] }), "`input[1]` cannot be empty");
  },
});
