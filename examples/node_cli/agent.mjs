// An agent in another language: spells a word backwards, and checks itself once.
// Run it with: AGENTRL_TASK='"stone"' OPENAI_BASE_URL=... OPENAI_API_KEY=... node agent.mjs

const { OPENAI_BASE_URL, OPENAI_API_KEY, AGENTRL_TASK } = process.env;
const word = JSON.parse(AGENTRL_TASK);

async function chat(messages) {
  const response = await fetch(`${OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${OPENAI_API_KEY}` },
    body: JSON.stringify({ model: "policy", messages }),
  });
  if (!response.ok) throw new Error(`the model answered ${response.status}: ${await response.text()}`);
  return (await response.json()).choices[0].message;
}

const messages = [{ role: "user", content: `Spell "${word}" backwards. Reply with one word.` }];
const first = await chat(messages);
messages.push(first, { role: "user", content: "Check each letter, and reply with the final word." });
const second = await chat(messages);
console.log(JSON.stringify({ first: first.content, final: second.content.trim() }));
