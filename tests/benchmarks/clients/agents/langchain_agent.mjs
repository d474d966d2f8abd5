import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { SCHEMA, SYSTEM, add, play } from "./play.mjs";

const about = { name: "add", description: "Add two numbers.", schema: SCHEMA };

await play(async (questions, streamed) => {
  const model = new ChatOpenAI({ model: "policy" });
  const agent = createAgent({ model, tools: [tool(add, about)], systemPrompt: SYSTEM });
  let messages = [];
  for (const content of questions) {
    const asked = { messages: [...messages, { role: "user", content }] };
    if (streamed) {
      for await (const [mode, piece] of await agent.stream(asked, { streamMode: ["messages", "values"] })) {
        if (mode === "values") messages = piece.messages;
      }
    } else {
      messages = (await agent.invoke(asked)).messages;
    }
  }
});
