import { Agent, MemorySession, OpenAIConversationsSession, run, tool } from "@openai/agents";
import { ARGUMENT, SCHEMA, SYSTEM, add, play } from "./play.mjs";

const adds = tool({
  name: "add",
  description: "Add two numbers.",
  parameters: { ...SCHEMA, additionalProperties: true },
  strict: false,
  execute: add,
});

await play(async (questions, streamed) => {
  const agent = new Agent({ name: "solver", instructions: SYSTEM, tools: [adds], model: "policy" });
  const kept = ARGUMENT === "conversations"; // by the server
  const session = kept ? new OpenAIConversationsSession() : new MemorySession();
  for (const question of questions) {
    const result = await run(agent, question, { session, stream: streamed });
    if (streamed) {
      for await (const _ of result);
      await result.completed;
      if (result.error) throw result.error;
    }
  }
  await session.clearSession();
});
