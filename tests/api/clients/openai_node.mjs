// needs: openai zod
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { ANSWER, FACTS, MODEL, SUM, URL, works } from "./asked.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0 });
const asked = { model: MODEL, messages: [{ role: "user", content: SUM }] };
works("chat", (await client.chat.completions.create(asked)).choices[0].message.content === ANSWER);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
  text += chunk.choices[0]?.delta.content ?? "";
works("stream", text === ANSWER);
const person = z.object({ job: z.enum(["nurse", "driver", "pilot"]), age: z.number().int() });
const parsed = await client.chat.completions.parse({
  model: MODEL, messages: [{ role: "user", content: FACTS }], response_format: zodResponseFormat(person, "person"),
});
works("structured", typeof parsed.choices[0].message.parsed.age === "number");
works("responses", (await client.responses.create({ model: MODEL, input: SUM })).output_text === ANSWER);
