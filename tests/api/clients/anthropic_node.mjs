// needs: @anthropic-ai/sdk
import Anthropic from "@anthropic-ai/sdk";
import { ANSWER, MODEL, SUM, URL, works } from "./asked.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: "none", maxRetries: 0 });
const asked = { model: MODEL, max_tokens: 4096, messages: [{ role: "user", content: SUM }] };
works("chat", (await client.messages.create(asked)).content[0].text === ANSWER);
works("stream", (await client.messages.stream(asked).finalText()) === ANSWER);
