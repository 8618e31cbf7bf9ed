import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { assert, base, cities, fetchSeeded, key, model, question, run, schema } from "./checks.mjs";

const openai = createOpenAI({ baseURL: base, apiKey: key, fetch: fetchSeeded });
const models = {
  chat: openai.chat(model),
  responses: openai.responses(model),
  compatible: createOpenAICompatible({
    name: "penstock", baseURL: base, apiKey: key, fetch: fetchSeeded, supportsStructuredOutputs: true,
  })(model),
  messages: createAnthropic({ baseURL: base, apiKey: key, fetch: fetchSeeded })(model),
};
const said = { maxOutputTokens: 120, temperature: 1, maxRetries: 0, prompt: question };
const weather = (calls) =>
  tool({ description: "Tells the weather.", inputSchema: jsonSchema(schema), execute: ({ city }) => calls.push(city) && "rain" });

await run({
  async chat_and_stream() {
    for (const each of Object.values(models)) {
      assert.ok((await generateText({ model: each, ...said })).finishReason);
      let error;
      const stream = streamText({ model: each, ...said, onError: (event) => { error = event.error; } });
      await stream.consumeStream();
      assert.equal(error, undefined);
    }
  },
  async tool_loop() {
    for (const [name, each] of Object.entries(models)) {
      const calls = [];
      const tools = { weather: weather(calls) };
      await generateText({ model: each, ...said, tools, toolChoice: "required", stopWhen: stepCountIs(3) });
      assert.ok(calls.length >= 3 && calls.every((city) => cities.includes(city)), `${name}: ${calls}`);
    }
  },
  async structured_output() {
    for (const [name, each] of Object.entries(models)) {
      const output = Output.object({ schema: jsonSchema(schema), name: "weather" });
      const answer = await generateText({ model: each, ...said, output });
      assert.ok(cities.includes(answer.output.city), name);
    }
  },
});
