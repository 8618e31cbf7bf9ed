import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run as runAgent, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { assert, base, fetchSeeded, key, model, question, run } from "./checks.mjs";

setTracingDisabled(true);
const client = new OpenAI({ baseURL: base, apiKey: key, fetch: fetchSeeded });
const kinds = { chat: OpenAIChatCompletionsModel, responses: OpenAIResponsesModel };
const said = { maxTokens: 120, temperature: 1 };
const agent = (Kind, options = {}, settings = {}) =>
  new Agent({ name: "a", model: new Kind(client, model), modelSettings: { ...said, ...settings }, ...options });

const itemsOf = (turns) =>
  turns.map(({ role, content }) =>
    role === "user" ? { role, content } : { role, status: "completed", content: [{ type: "output_text", text: content }] });
const apiOf = (Kind) => ({
  refusesCut: Kind === OpenAIResponsesModel,
  async ask(turns, limit) {
    return (await runAgent(agent(Kind, {}, { maxTokens: limit }), itemsOf(turns))).finalOutput;
  },
  async stream(turns, limit) {
    const stream = await runAgent(agent(Kind, {}, { maxTokens: limit }), itemsOf(turns), { stream: true });
    await stream.completed;
    return stream.finalOutput;
  },
});
const apis = Object.fromEntries(Object.entries(kinds).map(([name, Kind]) => [name, apiOf(Kind)]));

await run(apis, {
  async tool_loop() {
    for (const Kind of Object.values(kinds)) {
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
    for (const Kind of Object.values(kinds)) {
      const outputType = z.object({ city: z.enum(["Oslo", "Rome"]) });
      const result = await runAgent(agent(Kind, { outputType }), question);
      assert.ok(["Oslo", "Rome"].includes(result.finalOutput.city));
    }
  },
});
