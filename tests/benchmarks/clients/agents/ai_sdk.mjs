import { createAnthropic } from "@ai-sdk/anthropic";
import { createGoogleGenerativeAI } from "@ai-sdk/google";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { ARGUMENT, KEY, ROOT, SCHEMA, SYSTEM, add, play } from "./play.mjs";

const at = { apiKey: KEY, baseURL: `${ROOT}/v1` };
const model = {
  openai: () => createOpenAI(at)("policy"),
  compatible: () => createOpenAICompatible({ ...at, name: "agentrl" })("policy"),
  anthropic: () => createAnthropic(at)("policy"),
  google: () => createGoogleGenerativeAI({ ...at, baseURL: `${ROOT}/v1beta` })("policy"),
}[ARGUMENT]();
const description = "Add two numbers.";
const tools = { add: tool({ description, inputSchema: jsonSchema(SCHEMA), execute: add }) };

await play(async (questions, streamed) => {
  const messages = [];
  for (const content of questions) {
    messages.push({ role: "user", content });
    const options = { model, tools, messages, system: SYSTEM, stopWhen: stepCountIs(5) };
    if (streamed) {
      let failure;
      const result = streamText({ ...options, onError: ({ error }) => (failure = error) });
      await result.consumeStream();
      if (failure) throw failure;
      messages.push(...(await result.responseMessages));
    } else {
      messages.push(...(await generateText(options)).responseMessages);
    }
  }
});
