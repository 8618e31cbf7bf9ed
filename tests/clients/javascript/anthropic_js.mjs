import Anthropic from "@anthropic-ai/sdk";
import { asked, assert, cities, key, model, run, schema, url } from "./checks.mjs";

const client = new Anthropic({ baseURL: url, apiKey: key });
const said = { model, max_tokens: 40, seed: 5 };
const tool = { name: "weather", description: "Tells the weather.", input_schema: schema, strict: true };
const textOf = (message) => message.content.map((block) => block.text ?? "").join("");

const messagesApi = {
  async ask(messages, limit) {
    return textOf(await client.messages.create({ messages, ...said, max_tokens: limit }));
  },
  async stream(messages, limit) {
    return client.messages.stream({ messages, ...said, max_tokens: limit }).finalText();
  },
};

await run({ messages: messagesApi }, {
  async tool_loop() {
    const messages = [...asked];
    for (let turn = 0; turn < 3; turn += 1) {
      const choice = { tools: [tool], tool_choice: { type: "any", disable_parallel_tool_use: true }, max_tokens: 200 };
      const answer = await client.messages.create({ messages, ...said, ...choice });
      const call = answer.content.find((block) => block.type === "tool_use");
      assert.ok(cities.includes(call.input.city));
      const result = { type: "tool_result", tool_use_id: call.id, content: "rain" };
      messages.push({ role: "assistant", content: answer.content }, { role: "user", content: [result] });
    }
  },
  async structured_output() {
    const form = { output_config: { format: { type: "json_schema", schema } }, max_tokens: 200 };
    const answer = await client.messages.create({ messages: asked, ...said, ...form });
    assert.ok(cities.includes(JSON.parse(textOf(answer)).city));
  },
  async continued_in_place() {
    const cut = await client.messages.create({ messages: asked, ...said, max_tokens: 3 });
    assert.equal(cut.stop_reason, "max_tokens");
    const messages = [...asked, { role: "assistant", content: textOf(cut).trim() || "It" }];
    assert.ok((await client.messages.create({ messages, ...said })).usage.output_tokens);
  },
});
