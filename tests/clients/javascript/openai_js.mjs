import OpenAI from "openai";
import { asked, assert, base, cities, key, model, noThinking, run, schema } from "./checks.mjs";

const client = new OpenAI({ baseURL: base, apiKey: key });
const said = { model, max_tokens: 40, temperature: 1, seed: 5, ...noThinking };
const made = { model, max_output_tokens: 40, temperature: 1, seed: 5, ...noThinking };
const tool = { type: "function", function: { name: "weather", parameters: schema, strict: true } };

const apis = {
  chat: {
    async ask(messages, limit) {
      return (await client.chat.completions.create({ messages, ...said, max_tokens: limit })).choices[0].message.content;
    },
    async stream(messages, limit) {
      let text = "";
      const parts = await client.chat.completions.create({ messages, stream: true, ...said, max_tokens: limit });
      for await (const part of parts) text += part.choices[0]?.delta?.content ?? "";
      return text;
    },
  },
  responses: {
    async ask(input, limit) {
      return (await client.responses.create({ input, ...made, max_output_tokens: limit })).output_text;
    },
    async stream(input, limit) {
      return (await client.responses.stream({ input, ...made, max_output_tokens: limit }).finalResponse()).output_text;
    },
  },
};

await run(apis, {
  async tool_loop() {
    const messages = [...asked];
    for (let turn = 0; turn < 3; turn += 1) {
      const choice = { tools: [tool], tool_choice: "required", parallel_tool_calls: false, max_tokens: 200 };
      const { message } = (await client.chat.completions.create({ messages, ...said, ...choice })).choices[0];
      const [call] = message.tool_calls;
      assert.ok(cities.includes(JSON.parse(call.function.arguments).city));
      messages.push(message, { role: "tool", tool_call_id: call.id, content: "rain" });
    }
  },
  async structured_output() {
    const form = { type: "json_schema", json_schema: { name: "weather", strict: true, schema } };
    const answer = await client.chat.completions.parse({ messages: asked, ...said, max_tokens: 200, response_format: form });
    assert.ok(cities.includes(answer.choices[0].message.parsed.city));
  },
  async continued_in_place() {
    const cut = (await client.chat.completions.create({ messages: asked, ...said, max_tokens: 3 })).choices[0];
    assert.equal(cut.finish_reason, "length");
    const messages = [...asked, { role: "assistant", content: cut.message.content || "It" }];
    const more = { continue_final_message: true, add_generation_prompt: false };
    assert.ok((await client.chat.completions.create({ messages, ...said, ...more })).choices[0].message.content);
  },
});
