// What the programs share: the tool, and a loop over the conversations of a task.
import { writeFileSync } from "node:fs";

export const ROOT = process.env.OPENAI_BASE_URL.replace(/\/v1$/, "");
export const KEY = process.env.OPENAI_API_KEY;
export const ARGUMENT = process.argv[2] ?? "";
export const SYSTEM = "Add with the tool.";
export const SCHEMA = {
  type: "object",
  properties: {
    a: { type: "integer", description: "one number" },
    b: { type: "integer", description: "another" },
    note: { type: "string", description: "what it is for" },
  },
  required: ["a", "b"],
};

export function add({ a, b }) {
  if (![a, b].every(Number.isInteger)) throw new TypeError("a and b are numbers");
  return String(a + b);
}

export function called(text) {
  try {
    return add(typeof text === "string" ? JSON.parse(text) : text);
  } catch (error) {
    return `Error: ${error.message}`;
  }
}

// `talk`: (questions, streamed) => promise, asks the questions in one conversation.
export async function play(talk) {
  const task = JSON.parse(process.env.AGENTRL_TASK);
  const outcomes = {};
  for (const [name, questions] of Object.entries(task.cases)) {
    try {
      await talk(questions, task.streamed);
      outcomes[name] = "";
    } catch (error) {
      outcomes[name] = `${error?.name}: ${error?.message}`.slice(0, 600);
    }
  }
  writeFileSync(process.env.AGENTRL_RESULT_FILE, JSON.stringify(outcomes));
  process.exit(0);
}
