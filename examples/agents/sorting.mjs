// An agent of Node: it asks for sorted letters, and once more if they are not sorted.
// `node sorting.mjs LETTERS`, with OPENAI_BASE_URL and OPENAI_API_KEY in the environment.
import OpenAI from "openai";

const client = new OpenAI();
const prompt = process.argv[2];
const wanted = [...prompt].sort().join("");
const messages = [{ role: "user", content: prompt }];
for (let turn = 0; turn < 2; turn++) {
  const answer = await client.chat.completions.create({ model: "policy", messages, max_tokens: 10 });
  const { message } = answer.choices[0];
  if (message.content === wanted) break;
  messages.push(message, { role: "user", content: prompt });
}
