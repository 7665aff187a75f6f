/** One conversation with one policy: its controls, its canvas, its numbers. */

import { Canvas } from "./canvas.js";
import * as code from "./code.js";
import { Controls, element } from "./controls.js";
import { inWords } from "./policy.js";
import { Recording } from "./recording.js";
import { call, events } from "./stream.js";

const WATCHING = {
  stream: true,
  stream_options: { include_canvas: true, include_usage: true },
  return_trajectory: true,
};

const EMPTY = "(empty answer)";
const MOST_EMPTY = 1024; // cells before the first canvas arrives; the server may refuse a longer one

export class Pane {
  /**
   * `changed` is called when data arrives, `again` to send a request again.
   * @param {() => void} changed @param {(pane: Pane) => void} again
   */
  constructor(changed, again) {
    this.root = document.getElementById("pane").content.firstElementChild.cloneNode(true);
    this.changed = changed;
    this.turns = []; // messages of finished turns
    this.recording = null;
    this.canvas = new Canvas(this.part("canvas"), this.part("note"));
    this.part("policy").addEventListener("input", () => this.#summarize());
    this.part("again").addEventListener("click", () => again(this));
    for (const button of this.root.querySelectorAll("[data-language]")) {
      button.addEventListener("click", () => this.#showCode(button));
    }
    this.part("copy").addEventListener("click", () => copy(this.part("code"), this.part("copy")));
  }

  part(name) {
    return this.root.querySelector(`[data-part=${name}]`);
  }

  /** Name the pane; an empty name is for a single pane. */
  rename(name) {
    this.name = name;
    this.part("name").textContent = name ? `Policy ${name}:` : "Policy:";
  }

  /** Show controls for fields of the request and of its diffusion parameters. */
  setControls(fields, diffusionFields, initial) {
    this.controls = new Controls(fields, initial);
    this.diffusion = new Controls(diffusionFields, initial.diffusion);
    this.part("controls").replaceChildren(this.diffusion.root, this.controls.root);
    this.#summarize();
  }

  get policy() {
    const diffusion = this.diffusion?.value ?? {};
    const sent = Object.keys(diffusion).length ? { diffusion } : {};
    return { ...this.controls?.value, ...sent };
  }

  /** Clear the conversation. */
  clear() {
    this.stop();
    this.turns = [];
    this.recording = this.asked = null;
    this.part("turns").replaceChildren();
    this.part("work").hidden = true;
  }

  stop() {
    this.abort?.abort();
  }

  /** Return the request that continues this conversation, or fills a gap, with the current policy. */
  ask(model, given) {
    const { text, before, after, gap } = given;
    const body = { model, ...this.policy };
    if (before !== undefined) {
      const filling = { ...body, prompt: before, suffix: after, max_tokens: gap };
      return { given, path: "v1/completions", body: filling };
    }
    const message = { role: "user", content: text };
    const messages = [...this.turns, message];
    return { given, path: "v1/chat/completions", body: { ...body, messages }, message };
  }

  /** Send a request and receive its answer; failures are shown, not thrown. */
  async run(asked) {
    this.stop();
    this.asked = asked;
    const abort = (this.abort = new AbortController());
    this.#begin(asked);
    const recording = (this.recording = new Recording(performance.now()));
    try {
      const body = { ...asked.body, ...WATCHING };
      const options = { key: asked.given.key, body, signal: abort.signal };
      for await (const chunk of events(await call(asked.path, options))) {
        recording.add(chunk, performance.now());
        this.changed();
      }
      this.#finish(asked);
    } catch (error) {
      const kept = recording.last.forward ? " What arrived before is shown." : "";
      const stopped = abort.signal.aborted;
      this.#fail(stopped ? "Stopped." : `${error.message}${kept}`);
    }
    if (this.abort === abort) this.abort = null;
    this.changed();
  }

  get running() {
    return Boolean(this.abort);
  }

  #begin({ message, body }) {
    this.part("work").hidden = false;
    this.part("failure").hidden = true;
    this.state = "denoising";
    const { model, messages, prompt, suffix, ...policy } = body;
    this.part("made").textContent = `${model} \u00b7 ${inWords(policy)}`;
    this.part("listing").hidden = true;
    this.part("said").textContent = "";
    const shown = message ? [...this.turns, message] : [];
    this.part("turns").replaceChildren(...shown.map(turn));
    this.length = Math.min(body.max_tokens ?? 0, MOST_EMPTY);
    const lines = Math.min(Math.ceil((this.length || 96) / 20), 12);
    this.part("answer").style.minHeight = `${lines}lh`; // so that the page does not grow line by line
  }

  #finish({ message }) {
    const { text, finish } = this.recording;
    this.state = finish === "length" ? "complete, max_tokens reached" : "complete";
    const which = this.name ? `Answer ${this.name}` : "Answer";
    this.part("said").textContent = `${which}: ${text || EMPTY}`;
    if (message) this.turns = [...this.turns, message, { role: "assistant", content: text }];
  }

  #fail(reason) {
    this.state = "incomplete";
    if (!this.recording.positions.length) {
      this.length = 0; // nothing arrived, so there is no canvas
      this.part("answer").style.minHeight = "";
    }
    this.part("reason").textContent = reason;
    this.part("failure").hidden = false;
  }

  /** Show the state after `forward` forwards, on a colour scale that ends at `total`. */
  show(forward, total) {
    const { recording } = this;
    if (!recording) return;
    const frame = recording.frameAt(forward);
    this.length = Math.max(this.length, recording.positions.length);
    this.canvas.show(recording, frame, total, this.length);
    const { before, after } = this.asked.given;
    const text = recording.textAt(frame);
    const isEmpty = recording.finish !== null && recording.text === "";
    const isEnd = frame === recording.frames.length - 1;
    const said = isEmpty && isEnd ? element("em", {}, EMPTY) : text;
    const filled = [before, element("mark", {}, said), after];
    this.part("answer").replaceChildren(...(before === undefined ? [said] : filled));
    for (const [name, value] of Object.entries(recording.numbersAt(frame))) {
      const digits = name === "tokensPerForward" ? 2 : 0;
      this.part(name).textContent = value === null ? "\u2013" : value.toFixed(digits);
    }
    this.part("scale").textContent = total;
    this.part("state").textContent = isEnd ? this.state : "denoising";
  }

  #summarize() {
    this.part("summary").textContent = inWords(this.policy);
  }

  #showCode(button) {
    for (const each of button.parentElement.children) {
      each.setAttribute("aria-pressed", each === button);
    }
    const { path, body, given } = this.asked;
    const url = new URL(".", document.baseURI).href;
    const program = code[button.dataset.language]({ url, path, body, hasKey: given.key !== "" });
    this.part("code").textContent = program;
    this.part("listing").hidden = false;
  }
}

function turn({ role, content }) {
  const who = element("span", { className: "who" }, role === "user" ? "You" : "Model");
  return element("li", { className: role }, who, element("p", {}, content || EMPTY));
}

async function copy(source, button) {
  try {
    await navigator.clipboard.writeText(source.textContent);
  } catch {
    // Without HTTPS, browsers offer only this.
    getSelection().selectAllChildren(source);
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}
