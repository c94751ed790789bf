// The `openai` client for Node, unmodified, against a router: `node client.mjs URL MODEL`. Prints what it found as
// JSON, for test_openai_node.py.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const question = [{ role: "user", content: "What is the capital of France?" }];
const paris = "The capital of France is Paris.";
const asked = { model, messages: question, temperature: 0 };

const models = [];
for await (const each of client.models.list()) models.push(each.id);
assert.deepEqual(models, [model]);

const whole = await client.chat.completions.create(asked);
assert.equal(whole.choices[0].message.content, paris);
assert.equal(whole.id, `chatcmpl-${whole._request_id}`);

let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, paris);
assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);

const runner = client.chat.completions.stream(asked);
assert.equal(await runner.finalContent(), paris);

const several = await client.chat.completions.create({ ...asked, n: 2, logprobs: true, top_logprobs: 1 });
assert.deepEqual(several.choices.map((choice) => choice.message.content), [paris, paris]);
assert.equal(several.choices[1].logprobs.content[0].top_logprobs.length, 1);

const stopped = await client.chat.completions.create({ ...asked, stop: " France" });
assert.equal(stopped.choices[0].message.content, "The capital of");

const prompt = { model, prompt: "One, two, three, four, five,", temperature: 0, max_tokens: 6 };
assert.match((await client.completions.create(prompt)).choices[0].text, /^ six, seven/);

await assert.rejects(client.chat.completions.create({ ...asked, model: "gpt" }), (error) => {
  assert.ok(error instanceof OpenAI.NotFoundError);
  assert.equal(error.code, "model_not_found");
  return true;
});
await assert.rejects(client.chat.completions.create({ ...asked, temperature: -1 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.param, "temperature");
  return true;
});

// A stream that is left, and a request that takes too long for its client.
const long = { ...asked, max_tokens: 1500, ignore_eos: true };
for await (const chunk of await client.chat.completions.create({ ...long, stream: true })) {
  if (chunk.choices[0]?.delta?.content) break;
}
await assert.rejects(client.chat.completions.create(long, { timeout: 500 }), OpenAI.APIConnectionTimeoutError);

// A conversation: nothing is sent but its messages.
const messages = [
  {
    role: "system",
    content:
      "You answer in one short sentence. Some facts: the Rhine flows through Basel, Strasbourg, Cologne and " +
      "Rotterdam. The Danube flows through Ulm, Vienna, Budapest and Belgrade. The Elbe flows through Dresden, " +
      "Magdeburg and Hamburg. The Rhone flows through Geneva, Lyon, Avignon and Arles.",
  },
];
const turns = [];
for (const content of ["Which river flows through Lyon?", "And through Dresden?", "And through Ulm?"]) {
  messages.push({ role: "user", content });
  const answer = await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 24 });
  messages.push(answer.choices[0].message);
  turns.push(answer.id);
}
console.log(JSON.stringify({ turns }));
