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
const said = { maxOutputTokens: 120, temperature: 1, prompt: question };
const apiOf = (each) => ({
  async ask(messages, limit) {
    return (await generateText({ model: each, messages, temperature: 1, maxOutputTokens: limit })).text;
  },
  async stream(messages, limit) {
    let text = "";
    for await (const part of streamText({ model: each, messages, temperature: 1, maxOutputTokens: limit }).textStream) text += part;
    return text;
  },
});
const apis = Object.fromEntries(Object.entries(models).map(([name, each]) => [name, apiOf(each)]));
const weather = (calls) =>
  tool({ description: "Tells the weather.", inputSchema: jsonSchema(schema), execute: ({ city }) => calls.push(city) && "rain" });

await run(apis, {
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
