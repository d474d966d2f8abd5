import OpenAI from "openai";
import { ARGUMENT, SCHEMA, SYSTEM, add, called, play } from "./play.mjs";

const client = new OpenAI();
const about = { name: "add", description: "Add two numbers.", parameters: SCHEMA };

async function chat(questions, streamed) {
  const tool = { type: "function", function: { ...about, function: add, parse: JSON.parse } };
  let messages = [{ role: "system", content: SYSTEM }];
  for (const content of questions) {
    messages = [...messages, { role: "user", content }];
    const runner = client.chat.completions.runTools({
      model: "policy", messages, tools: [tool], stream: streamed,
    });
    await runner.finalChatCompletion();
    messages = [...runner.messages];
  }
}

async function responses(questions, streamed) {
  const tools = [{ type: "function", ...about }];
  const input = [];
  for (const content of questions) {
    input.push({ role: "user", content });
    for (;;) {
      const body = { model: "policy", instructions: SYSTEM, tools, input };
      const { output } = streamed
        ? await client.responses.stream(body).finalResponse()
        : await client.responses.create(body);
      input.push(...output);
      const calls = output.filter((item) => item.type === "function_call");
      for (const call of calls) {
        const output = called(call.arguments);
        input.push({ type: "function_call_output", call_id: call.call_id, output });
      }
      if (!calls.length) break;
    }
  }
}

await play(ARGUMENT === "responses" ? responses : chat);
