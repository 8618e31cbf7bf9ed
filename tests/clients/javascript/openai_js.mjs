import OpenAI from "openai";
import { asked, assert, base, cities, key, model, noThinking, run, schema } from "./checks.mjs";

const client = new OpenAI({ baseURL: base, apiKey: key, maxRetries: 0 });
const said = { model, max_tokens: 40, temperature: 1, seed: 5, ...noThinking };
const made = { model, max_output_tokens: 40, temperature: 1, seed: 5 };
const tool = { type: "function", function: { name: "weather", parameters: schema, strict: true } };

await run({
  async chat_and_stream() {
    const whole = (await client.chat.completions.create({ messages: asked, ...said })).choices[0].message.content;
    const stream = await client.chat.completions.create({ messages: asked, stream: true, ...said });
    let text = "";
    for await (const part of stream) text += part.choices[0]?.delta?.content ?? "";
    assert.ok(whole);
    assert.equal(text, whole);
  },
  async responses_and_stream() {
    const whole = (await client.responses.create({ input: asked, ...made })).output_text;
    const stream = client.responses.stream({ input: asked, ...made });
    assert.equal((await stream.finalResponse()).output_text, whole);
  },
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
  async cut_and_continued() {
    const cut = (await client.chat.completions.create({ messages: asked, ...said, max_tokens: 3 })).choices[0];
    assert.equal(cut.finish_reason, "length");
    const messages = [...asked, { role: "assistant", content: cut.message.content || "It" }];
    const more = { continue_final_message: true, add_generation_prompt: false };
    assert.ok((await client.chat.completions.create({ messages, ...said, ...more })).choices[0].message.content);
  },
});
