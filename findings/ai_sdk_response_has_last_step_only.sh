#!/usr/bin/env bash
# Guess: after `generateText` with tools, `messages.push(...result.response.messages)` keeps the whole exchange, as with
#   AI SDK 6.
# So it is: from AI SDK 7 on `response` is that of the last step, and its `messages` are the last step's alone. The code runs
#   as before, types and all, and the next request has the answer without the calls and results that led to it;
#   `responseMessages` has them.
# Why it matters: an agent that was updated asks its policy to go on from answers that come from nowhere. Its turns share no
#   prefix beyond the question, and a policy is trained to answer without having called.
set -eu
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
get() { npm install --silent --no-audit --no-fund --prefix "$@" >npm.txt 2>&1 || { cat npm.txt; exit 2; }; }
get six ai@6.0.325 @ai-sdk/openai-compatible@2.0.92
get seven ai@7.0.173 @ai-sdk/openai-compatible@3.0.92
cat > try.mjs <<'NODE'
import { createServer } from "node:http";
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, tool } from "ai";

const server = createServer(async (request, response) => {
  let text = "";
  for await (const part of request) text += part;
  const called = JSON.parse(text).messages.some((message) => message.role === "tool");
  const call = { id: "c1", type: "function", function: { name: "add", arguments: '{"a":1,"b":2}' } };
  const message = called ? { role: "assistant", content: "3" } : { role: "assistant", content: null, tool_calls: [call] };
  const choices = [{ index: 0, message, finish_reason: called ? "stop" : "tool_calls" }];
  response.setHeader("content-type", "application/json");
  response.end(JSON.stringify({ id: "x", object: "chat.completion", created: 1, model: "m", choices }));
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const baseURL = `http://127.0.0.1:${server.address().port}/v1`;
const model = createOpenAICompatible({ name: "local", baseURL, apiKey: "k" })("m");
const properties = { a: { type: "integer" }, b: { type: "integer" } };
const add = tool({ inputSchema: jsonSchema({ type: "object", properties }), execute: ({ a, b }) => a + b });
const result = await generateText({ model, tools: { add }, prompt: "1 + 2?", stopWhen: stepCountIs(3) });
const roles = (messages) => messages?.map((message) => message.role).join(", ") ?? "(does not exist)";
console.log("ai", JSON.parse(readFileSync("node_modules/ai/package.json")).version, "-", result.steps.length, "steps");
console.log("  response.messages:", roles(result.response.messages));
console.log("  responseMessages: ", roles(result.responseMessages));
process.exit(Number(roles(result.response.messages) !== process.argv[2]));
NODE
cp try.mjs six && cp try.mjs seven
(cd six && node try.mjs "assistant, tool, assistant")
(cd seven && node try.mjs "assistant")
