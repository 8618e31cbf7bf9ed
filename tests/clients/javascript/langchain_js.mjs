import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { ChatOpenAI } from "@langchain/openai";
import { assert, base, cities, key, model, noThinking, question, run, schema } from "./checks.mjs";

const options = { model, apiKey: key, configuration: { baseURL: base }, maxTokens: 200, temperature: 1 };
const upTo = (maxTokens) => new ChatOpenAI({ ...options, maxTokens, modelKwargs: { seed: 5, ...noThinking } });
const chat = upTo(200);
const tool = { type: "function", function: { name: "weather", description: "Tells the weather.", parameters: schema, strict: true } };

const chatApi = {
  async ask(turns, limit) {
    return (await upTo(limit).invoke(turns)).content;
  },
  async stream(turns, limit) {
    let text = "";
    for await (const part of await upTo(limit).stream(turns)) text += part.content;
    return text;
  },
};

await run({ chat: chatApi }, {
  async tool_loop() {
    const bound = chat.bindTools([tool], { tool_choice: "required" });
    const messages = [new HumanMessage(question)];
    for (let turn = 0; turn < 3; turn += 1) {
      const answer = await bound.invoke(messages);
      messages.push(answer);
      for (const call of answer.tool_calls) {
        assert.ok(cities.includes(call.args.city));
        messages.push(new ToolMessage({ content: "rain", tool_call_id: call.id }));
      }
    }
  },
  async structured_output() {
    for (const method of ["jsonSchema", "functionCalling"]) {
      const made = await chat.withStructuredOutput(schema, { name: "weather", method, strict: true }).invoke(question);
      assert.ok(cities.includes(made.city), method);
    }
  },
});
