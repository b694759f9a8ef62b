// Anthropic's client for Node.
import Anthropic from "@anthropic-ai/sdk";
import { CASES, MODEL, SCHEMA, URL_OF_SERVER, refused, tell } from "./cases.mjs";

const client = new Anthropic({ baseURL: URL_OF_SERVER, apiKey: "none" });
const how = { model: MODEL, temperature: 0, max_tokens: CASES.answer_tokens };
const asked = { system: CASES.system, messages: [{ role: "user", content: CASES.question }] };
const ask = (more) => client.messages.create({ ...how, ...asked, ...more });
const text = (answer) => answer.content.map((block) => block.text ?? "").join("");

await tell("@anthropic-ai/sdk", {
  chat: async () => text(await ask({})),
  stream: async () => {
    const pieces = [];
    const answer = client.messages.stream({ ...how, ...asked }).on("text", (piece) => pieces.push(piece));
    await answer.finalMessage();
    return pieces;
  },
  tools: async () => {
    const messages = [{ role: "user", content: CASES.errand }];
    const tools = [{ name: CASES.tool.name, description: CASES.tool.description, input_schema: SCHEMA }];
    const places = [];
    while (places.length < CASES.steps) {
      const { content } = await ask({ messages: [...messages], tools, tool_choice: { type: "tool", name: "look" } });
      const call = content.find((block) => block.type === "tool_use");
      places.push(call.input.place);
      const result = { type: "tool_result", tool_use_id: call.id, content: CASES.told };
      messages.push({ role: "assistant", content }, { role: "user", content: [result] });
    }
    return places;
  },
  structured: async () => {
    const format = { type: "json_schema", schema: SCHEMA };
    return JSON.parse(text(await ask({ output_config: { format } }))).place;
  },
  cut: async () => (await ask({ max_tokens: CASES.cut_tokens })).stop_reason,
  error: () => refused(Anthropic.NotFoundError, () => ask({ model: CASES.unknown_model })),
});
