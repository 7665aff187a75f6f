// needs: ai @ai-sdk/openai-compatible zod
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";
import { ANSWER, FACTS, MODEL, SUM, URL, works } from "./asked.mjs";

const server = createOpenAICompatible({ name: "diffray", baseURL: `${URL}/v1`, supportsStructuredOutputs: true });
const asked = { model: server(MODEL), maxRetries: 0 };
works("chat", (await generateText({ ...asked, prompt: SUM })).text === ANSWER);
works("stream", (await streamText({ ...asked, prompt: SUM }).text) === ANSWER);
const schema = z.object({ job: z.enum(["nurse", "driver", "pilot"]), age: z.number().int() });
works("structured", typeof (await generateObject({ ...asked, schema, prompt: FACTS })).object.age === "number");
const weather = tool({
  description: "Tell the weather of a city.", inputSchema: z.object({ city: z.enum(["Rome", "Tokyo"]) }),
  execute: async ({ city }) => `sunny in ${city}`,
});
const called = await generateText({ ...asked, prompt: SUM, tools: { weather }, toolChoice: "required" });
works("tools", called.toolResults[0].output.startsWith("sunny"));
