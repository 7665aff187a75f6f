/** Tests of the page's modules that need no browser; test_page.py copies them beside `page`. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { curl, javascript, python } from "./page/code.js";
import { acceptedBy, inWords } from "./page/policy.js";
import { Recording } from "./page/recording.js";
import { fieldsOf } from "./page/schema.js";
import { Failure, call, events } from "./page/stream.js";
import { partsOf } from "./page/text.js";

const view = (forwards, ...tokens) => ({ diffusion: { index: 0, forwards, tokens }, choices: [] });
const said = (content, ...logprobs) => ({
  choices: [{ delta: { content }, trajectory: { logprobs }, finish_reason: null }],
});

function recorded() {
  const recording = new Recording(1000);
  recording.add(view(1, null, "b", null), 2000);
  recording.add(view(3, "a", "b", null), 3000);
  recording.add(said("ab", Math.log(0.5), 0), 3000);
  recording.add(view(4, "a", "x", "c"), 5000);
  recording.add(said("c", 0), 5000);
  const usage = { completion_tokens: 3, prompt_tokens_details: { cached_tokens: 16 } };
  recording.add({ choices: [], usage, diffusion: { forwards: 4 } }, 6000);
  return recording;
}

test("a position shows what it held after a forward, and when that became final", () => {
  const recording = recorded();
  const shown = (position) =>
    recording.frames.map((_, frame) => recording.cell(position, frame)?.text ?? null);
  assert.deepEqual(shown(0), [null, null, "a", "a"]);
  assert.deepEqual(shown(1), [null, "b", "b", "x"]);
  assert.equal(recording.cell(1, 2).forward, 1);
  assert.equal(recording.cell(1, 3).forward, 4);
  assert.equal(recording.cell(0, 3).probability.toFixed(6), "0.500000");
  assert.equal(recording.cell(9, 3), null);
});

test("a forward without a frame of its own shows the frame before it", () => {
  const recording = recorded();
  assert.deepEqual([0, 1, 2, 3, 4, 99].map((at) => recording.frameAt(at)), [0, 1, 1, 2, 3, 3]);
  assert.deepEqual([0, 1, 2, 3].map((frame) => recording.textAt(frame)), ["", "", "ab", "abc"]);
});

test("numbers are those of the frame, at the end those of the server", () => {
  const recording = recorded();
  assert.deepEqual(recording.numbersAt(2), {
    forwards: 3, tokensPerForward: 2 / 3, tokensPerSecond: 1, cached: 16,
  });
  assert.equal(recording.numbersAt(3).tokensPerForward, 0.75);
  assert.equal(recording.numbersAt(3).tokensPerSecond, 0.6);
  assert.equal(recording.numbersAt(0).tokensPerForward, null);
});

test("tokens after the end of the answer do not count once the end is known", () => {
  const recording = new Recording(0);
  recording.add(view(1, "a", null, null, "end"), 1000);
  recording.add(view(2, "a", "end", "end", "end"), 2000);
  assert.equal(recording.numbersAt(1).tokensPerForward, 2);
  const usage = { completion_tokens: 2, prompt_tokens_details: { cached_tokens: 0 } };
  recording.add({ choices: [], usage, diffusion: { forwards: 2 } }, 2000);
  assert.equal(recording.numbersAt(1).tokensPerForward, 1);
  assert.equal(recording.numbersAt(2).tokensPerForward, 1);
});

test("what is final is followed by what else the canvas holds, without its end", () => {
  const recording = new Recording(0);
  const diffusion = { forwards: 1, tokens: ["a", null, "c", null, "<|end|>"], text: "a\u2591c\u2591" };
  recording.add({ diffusion, choices: [] }, 1);
  recording.add(said("a", 0), 1);
  assert.deepEqual([recording.textAt(1), recording.draftAt(1)], ["a", "\u2591c"]);
  assert.deepEqual([recording.endAt(0), recording.endAt(1)], [5, 4]);
  recording.add({ ...view(2, "a", "b", "c", "d", "e", "f"), warnings: ["lowered"] }, 2);
  assert.deepEqual(recording.frames.map(({ size }) => size), [5, 5, 6]);
  assert.deepEqual(recording.warnings, ["lowered"]);
});

test("a canvas that goes back to masks is shown so", () => {
  const recording = new Recording(0);
  recording.add(view(2, "a", "b"), 1);
  recording.add(view(3, "a", null), 2);
  assert.equal(recording.cell(1, 2), null);
  assert.equal(recording.last.final, 1);
});

test("drafts are shown as such, and what they became", () => {
  const recording = new Recording(0);
  const drafted = (forwards, drafts, ...tokens) => {
    const about = view(forwards, ...tokens);
    Object.assign(about.diffusion, { drafts, text: tokens.join("") });
    recording.add(about, 1000 * forwards);
  };
  drafted(1, 2, "a", "b", "<|end|>", null);
  recording.add(said("a", 0), 1000);
  drafted(2, 0, "a", "b", "c", null);
  drafted(3, 1, "a", "b", "c", "d");
  const isDraft = (frame) => [1, 2, 3].map((at) => recording.cell(at, frame)?.isDraft ?? null);
  assert.deepEqual([1, 2, 3].map(isDraft), [[true, true, null], [false, false, null], [false, false, true]]);
  assert.deepEqual([1, 2].map((at) => recording.cell(at, 2).drafted), ["b", "<|end|>"]);
  assert.equal(recording.cell(1, 2).forward, 2);
  assert.equal(recording.draftAt(1), "b<|end|>");
  assert.deepEqual([1, 2, 3].map((frame) => recording.frames[frame].final), [1, 3, 3]);
  assert.equal(recording.endAt(1), 4);
});

test("code is told from prose, marked or not, and the marks are left out", () => {
  const cases = {
    "def f(x):\n    return x": [["pre", "def f(x):\n    return x"]],
    '{"a": 1}': [["pre", '{"a": 1}']],
    "For example: import duties.": [["span", "For example: import duties."]],
    "Use `f`:\n```python\nf()\n\ng()\n```\nDone.": [
      ["span", "Use "], ["code", "f"], ["span", ":\n"], ["pre", "f()\n\ng()"], ["span", "Done."],
    ],
    "```\nstill arriving": [["pre", "still arriving"]],
    "a lone ` and 2*3": [["span", "a lone ` and 2*3"]],
    "": [],
  };
  for (const [text, expected] of Object.entries(cases)) {
    const parts = partsOf(text).map(([tag, start, stop]) => [tag, text.slice(start, stop)]);
    assert.deepEqual(parts, expected);
  }
});

const document = JSON.parse(readFileSync("openapi.json", "utf8"));
const { DiffusionParams, ChatBody } = document.components.schemas;

test("the document becomes fields with bounds, defaults and choices", () => {
  const fields = Object.fromEntries(
    fieldsOf(DiffusionParams, document).map((field) => [field.name, field]),
  );
  assert.ok(fields.decoder.parts.size >= 9 && fields.cache.parts.has("dual"));
  const [threshold] = fields.decoder.parts.get("threshold");
  assert.deepEqual(
    [threshold.name, threshold.type, threshold.minimum, threshold.maximum, threshold.default],
    ["threshold", "number", 0, 1, 0.9],
  );
  const remasking = fields.decoder.parts.get("fixed").find(({ name }) => name === "remasking");
  assert.deepEqual(remasking.choices, ["low_confidence", "random"]);
  assert.equal(fields.block_length.type, "integer");
  assert.equal(fields.zero_confidence_token_ids, undefined);
  const body = fieldsOf(ChatBody, document).map(({ name }) => name);
  for (const name of ["max_tokens", "temperature", "seed"]) assert.ok(body.includes(name));
});

test("only the kinds that a model accepts are offered", () => {
  const fields = fieldsOf(DiffusionParams, document);
  const model = { accepts: { cache: ["exact", "none"], iteration: ["soft"], suffix: false } };
  const kinds = (found, name) => [...found.find((field) => field.name === name).parts.keys()];
  const offered = acceptedBy(model, fields);
  assert.deepEqual(kinds(offered, "cache"), ["none", "exact"]);
  assert.deepEqual(kinds(offered, "iteration"), ["soft"]);
  assert.deepEqual(kinds(offered, "decoder"), kinds(fields, "decoder"));
  for (const unknown of [undefined, {}, { accepts: null }]) {
    assert.deepEqual(acceptedBy(unknown, fields), fields);
  }
});

test("a policy in words has every setting with its name", () => {
  const diffusion = { decoder: { kind: "fixed", steps: 32 }, cache: { kind: "none" }, cfg_scale: 1 };
  assert.equal(
    inWords({ diffusion, max_tokens: 96 }),
    "decoder fixed (steps 32) \u00b7 cache none \u00b7 cfg scale 1 \u00b7 max tokens 96",
  );
  assert.equal(inWords({}), "the server's default");
  assert.equal(inWords({ max_tokens: 96 }), "the server's default \u00b7 max tokens 96");
});

/** A response whose text arrives in pieces of some length. */
function stream(text, length) {
  const bytes = new TextEncoder().encode(text);
  let at = 0;
  const body = new ReadableStream({
    pull(controller) {
      if (at >= bytes.length) return controller.close();
      controller.enqueue(bytes.slice(at, (at += length)));
    },
  });
  return new Response(body);
}

async function all(response) {
  const found = [];
  for await (const each of events(response)) found.push(each);
  return found;
}

test("events arrive however the bytes are cut", async () => {
  const text = 'data: {"a":"\u00e9\u4e16"}\n\n: a comment\n\ndata: {"a":2}\n\ndata: [DONE]\n\n';
  for (const length of [1, 2, 7, 1000]) {
    assert.deepEqual(await all(stream(text, length)), [{ a: "\u00e9\u4e16" }, { a: 2 }]);
  }
});

test("a stream that ends early, or with an error, says so", async () => {
  await assert.rejects(all(stream('data: {"a":1}\n\ndata: {"a"', 9)), /connection was lost/);
  const broken = 'data: {"error":{"message":"The replica was lost."}}\n\ndata: [DONE]\n\n';
  await assert.rejects(all(stream(broken, 9)), new Failure("The replica was lost."));
});

test("a refusal is the server's message, and when to retry", async () => {
  const refusals = [
    [new Response('{"error":{"message":"Full."}}', { status: 429, headers: { "Retry-After": "2" } }),
      /^Failure: Full\. \(Retry after 2 s\.\)$/],
    [new Response("<html>", { status: 502 }), /answered 502/],
  ];
  for (const [response, message] of refusals) {
    globalThis.fetch = async () => response;
    const error = await call("v1/models").catch((each) => each);
    error.name = "Failure";
    assert.match(String(error), message);
    assert.equal(error.status, response.status);
  }
  globalThis.fetch = async () => { throw new TypeError("Failed to fetch"); };
  await assert.rejects(call("v1/models"), /cannot be reached/);
});

test("a program holds the request, quoted, and never the key", () => {
  const message = { role: "user", content: "it's \"x\" \\ \u00e9\n$HOME `id`" };
  const body = { model: "demo", messages: [message], diffusion: { decoder: { kind: "fixed" } } };
  const asked = { url: "http://h/", path: "v1/chat/completions", body, hasKey: true };
  assert.match(curl(asked), /it'\\''s/);
  assert.match(python(asked), /extra_body=\{"diffusion": \{"decoder": \{"kind": "fixed"\}\}\}/);
  assert.match(python({ ...asked, body: { ...body, x: [null, true, 1.5] } }), /\[None, True, 1.5\]/);
  for (const program of [curl, python, javascript]) {
    assert.match(program(asked), /DIFFRAY_API_KEY/);
    assert.doesNotMatch(program({ ...asked, hasKey: false }), /DIFFRAY_API_KEY/);
  }
});
