import { GoogleGenAI } from "@google/genai";
import { KEY, ROOT, SCHEMA, SYSTEM, called, play } from "./play.mjs";

const client = new GoogleGenAI({ apiKey: KEY, httpOptions: { baseUrl: ROOT } });
const declaration = { name: "add", description: "Add two numbers.", parametersJsonSchema: SCHEMA };

await play(async (questions, streamed) => {
  const chat = client.chats.create({
    model: "policy",
    config: {
      systemInstruction: SYSTEM,
      tools: [{ functionDeclarations: [declaration] }],
      thinkingConfig: { includeThoughts: true },
    },
  });
  for (const question of questions) {
    let message = question;
    for (;;) {
      const calls = [];
      if (streamed) {
        for await (const chunk of await chat.sendMessageStream({ message })) {
          calls.push(...(chunk.functionCalls ?? []));
        }
      } else {
        calls.push(...((await chat.sendMessage({ message })).functionCalls ?? []));
      }
      if (!calls.length) break;
      message = calls.map(({ id, name, args }) => ({
        functionResponse: { id, name, response: { output: called(args) } },
      }));
    }
  }
});
