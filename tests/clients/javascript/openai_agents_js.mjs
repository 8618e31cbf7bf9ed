import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run as runAgent, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { assert, base, fetchSeeded, key, model, question, run } from "./checks.mjs";

setTracingDisabled(true);
const client = new OpenAI({ baseURL: base, apiKey: key, maxRetries: 0, fetch: fetchSeeded });
const kinds = [OpenAIChatCompletionsModel, OpenAIResponsesModel];
const said = { maxTokens: 120, temperature: 1 };
const agent = (Kind, options = {}, settings = {}) =>
  new Agent({ name: "a", model: new Kind(client, model), modelSettings: { ...said, ...settings }, ...options });

await run({
  async chat_and_stream() {
    for (const Kind of kinds) {
      await runAgent(agent(Kind), question);
      const stream = await runAgent(agent(Kind), question, { stream: true });
      await stream.completed;
    }
  },
  async tool_loop() {
    for (const Kind of kinds) {
      let calls = 0;
      const parameters = z.object({ city: z.enum(["Oslo", "Rome"]) });
      const weather = tool({ name: "weather", description: "Tells the weather.", parameters, execute: () => { calls += 1; return "rain"; } });
      let history = question;
      for (let turn = 0; turn < 3; turn += 1) {
        const forced = agent(Kind, { tools: [weather] }, { toolChoice: "required", parallelToolCalls: false });
        const result = await runAgent(forced, history);
        history = [...result.history, { role: "user", content: "Again." }];
      }
      assert.ok(calls >= 3);
    }
  },
  async structured_output() {
    for (const Kind of kinds) {
      const outputType = z.object({ city: z.enum(["Oslo", "Rome"]) });
      const result = await runAgent(agent(Kind, { outputType }), question);
      assert.ok(["Oslo", "Rome"].includes(result.finalOutput.city));
    }
  },
});
