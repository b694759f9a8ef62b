// OpenAI's client for Node: chat completions, and Responses for the last answer's form.
import OpenAI from "openai";
import { CASES, MODEL, SCHEMA, URL_OF_SERVER, refused, tell } from "./cases.mjs";

const client = new OpenAI({ baseURL: `${URL_OF_SERVER}/v1`, apiKey: "none" });
const how = { model: MODEL, temperature: 0, max_completion_tokens: CASES.answer_tokens };
const messages = [
  { role: "system", content: CASES.system },
  { role: "user", content: CASES.question },
];
const ask = (more) => client.chat.completions.create({ ...how, messages, ...more });

await tell("openai", {
  chat: async () => (await ask({})).choices[0].message.content,
  stream: async () => {
    const pieces = [];
    for await (const chunk of await ask({ stream: true })) pieces.push(chunk.choices[0]?.delta?.content);
    return pieces.filter(Boolean);
  },
  tools: async () => {
    const history = [{ role: "user", content: CASES.errand }];
    const places = [];
    while (places.length < CASES.steps) {
      const tools = [{ type: "function", function: CASES.tool }];
      const { message } = (await ask({ messages: history, tools, tool_choice: "required" })).choices[0];
      const [call] = message.tool_calls;
      places.push(JSON.parse(call.function.arguments).place);
      history.push(message, { role: "tool", tool_call_id: call.id, content: CASES.told });
    }
    return places;
  },
  structured: async () => {
    const format = { type: "json_schema", name: "look", schema: SCHEMA, strict: true };
    const asked = { model: MODEL, temperature: 0, instructions: CASES.system, input: CASES.question };
    const answer = await client.responses.create({ ...asked, text: { format } });
    return JSON.parse(answer.output_text).place;
  },
  cut: async () => (await ask({ max_completion_tokens: CASES.cut_tokens })).choices[0].finish_reason,
  error: () => refused(OpenAI.NotFoundError, () => ask({ model: CASES.unknown_model })),
});
