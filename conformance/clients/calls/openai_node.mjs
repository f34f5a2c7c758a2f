// OpenAI's SDK for JavaScript.

import OpenAI from "openai";
import { TEXTS, main, refused, same, server, vectors } from "./harness.mjs";

const client = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: "-", maxRetries: 0 });
const embed = async (input, settings = {}) => {
  const answer = await client.embeddings.create({ model: server.embed, input, ...settings });
  return answer.data.map((item) => [...item.embedding]);
};

await main("openai", {
  async embeddings() {
    const rows = await embed(TEXTS);
    same(rows, await vectors());
    return rows;
  },
  async embeddings_as_floats_with_dimensions() {
    const settings = { dimensions: 8, encoding_format: "float" };
    same(await embed(TEXTS, settings), await vectors(TEXTS, { dimensions: 8 }));
  },
  async batch_above_teis_limit() {
    same((await embed(Array(100).fill("bo")))[99], (await vectors(["bo"]))[0]);
  },
  async errors_are_read() {
    await refused(() => embed(["a", ""]), "400", "`input[1]` cannot be empty");
    await refused(() => embed(["a"], { dimensions: 100000 }), "422", "the model's width");
  },
});
