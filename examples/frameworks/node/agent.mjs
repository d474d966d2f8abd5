// Two roles in Node, without packages: one answers, the other's verdict is streamed. The names of the
// models are the roles.

const { OPENAI_BASE_URL, OPENAI_API_KEY, AGENTRL_TASK } = process.env;
const question = JSON.parse(AGENTRL_TASK);

async function chat(model, instructions, text, stream = false) {
  const messages = [{ role: "system", content: instructions }, { role: "user", content: text }];
  const response = await fetch(`${OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${OPENAI_API_KEY}` },
    body: JSON.stringify({ model, messages, stream }),
  });
  if (!response.ok) throw new Error(`the model answered ${response.status}: ${await response.text()}`);
  return stream ? response.text() : (await response.json()).choices[0].message.content;
}

const answer = await chat("solver", "Solve it. Reply with the number.", question);
await chat("critic", "Check the answer: right or wrong?", `${question} ${answer}`, true);
console.log(JSON.stringify(answer));
