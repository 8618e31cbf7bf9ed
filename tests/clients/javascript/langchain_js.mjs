import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { ChatOpenAI } from "@langchain/openai";
import { assert, base, cities, key, model, noThinking, question, run, schema } from "./checks.mjs";

const options = { model, apiKey: key, configuration: { baseURL: base }, maxRetries: 0, maxTokens: 200, temperature: 1 };
const chat = new ChatOpenAI({ ...options, modelKwargs: { seed: 5, ...noThinking } });
const tool = { type: "function", function: { name: "weather", description: "Tells the weather.", parameters: schema, strict: true } };

await run({
  async chat_and_stream() {
    const whole = (await chat.invoke(question)).content;
    let text = "";
    for await (const part of await chat.stream(question)) text += part.content;
    assert.ok(whole);
    assert.equal(text, whole);
  },
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
