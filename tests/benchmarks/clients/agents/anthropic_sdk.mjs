import Anthropic from "@anthropic-ai/sdk";
import { SCHEMA, SYSTEM, called, play } from "./play.mjs";

const client = new Anthropic();
const tool = { name: "add", description: "Add two numbers.", input_schema: SCHEMA };

await play(async (questions, streamed) => {
  const messages = [];
  for (const content of questions) {
    messages.push({ role: "user", content });
    for (;;) {
      const body = {
        model: "policy", max_tokens: 2048, system: SYSTEM, tools: [tool], messages,
        thinking: { type: "adaptive" },
      };
      const said = streamed
        ? await client.messages.stream(body).finalMessage()
        : await client.messages.create(body);
      messages.push({ role: "assistant", content: said.content });
      const uses = said.content.filter((block) => block.type === "tool_use");
      if (!uses.length) break;
      const results = uses.map((use) => ({
        type: "tool_result", tool_use_id: use.id, content: called(use.input),
      }));
      messages.push({ role: "user", content: results });
    }
  }
});
