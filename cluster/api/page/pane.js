/** One conversation with one policy: its controls, its canvas, its numbers. */

import { Canvas } from "./canvas.js";
import * as code from "./code.js";
import { Controls, element } from "./controls.js";
import { inWords } from "./policy.js";
import { Recording } from "./recording.js";
import { call, events } from "./stream.js";
import { isCode, rendered } from "./text.js";

const WATCHING = {
  stream: true,
  stream_options: { include_canvas: true, include_usage: true },
  return_trajectory: true,
};

const EMPTY = "(empty answer)";
const LEFT = "The page was left before the answer was complete.";

export class Pane {
  /**
   * `changed` is called when data arrives, `again` to send a request again.
   * @param {() => void} changed @param {(pane: Pane) => void} again
   */
  constructor(changed, again) {
    this.root = document.getElementById("pane").content.firstElementChild.cloneNode(true);
    this.changed = changed;
    this.turns = []; // messages of finished turns
    this.shown = []; // messages above the answer
    this.asked = this.recording = null;
    this.settings = this.part("policy"); // the page may show it elsewhere
    this.canvas = new Canvas(this.part("canvas"), this.part("note"));
    this.settings.addEventListener("input", () => this.#summarize());
    this.part("again").addEventListener("click", () => again(this));
    for (const button of this.root.querySelectorAll("[data-language]")) {
      button.addEventListener("click", () => this.#showCode(button));
    }
    this.part("copy").addEventListener("click", () => copy(this.part("code"), this.part("copy")));
  }

  part(name) {
    const selector = `[data-part=${name}]`;
    return this.root.querySelector(selector) ?? this.settings.querySelector(selector);
  }

  /** Name the pane; an empty name is for a single pane. */
  rename(name) {
    this.name = name;
    this.part("name").textContent = name ? `Policy ${name}` : "Policy";
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
    this.asked = this.recording = null;
    this.#showTurns([]);
    this.part("work").hidden = true;
  }

  /** What a reload keeps of the conversation and of its policy. */
  get kept() {
    const { policy, turns, shown, asked, recording, state, running, reason } = this;
    return { policy, turns, shown, asked, recording, state, reason: running ? LEFT : reason };
  }

  /** Show the conversation that was kept. */
  restore({ turns, shown, asked, recording, state, reason }) {
    this.turns = turns;
    if (!asked) return;
    Object.assign(this, { asked, recording: Object.assign(new Recording(0), recording), state });
    this.#open(shown);
    if (reason) this.#fail(reason);
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
  async run(asked, key) {
    this.stop();
    const abort = (this.abort = new AbortController());
    const recording = new Recording(performance.now());
    Object.assign(this, { asked, recording, state: "denoising" });
    this.#open(asked.message ? [...this.turns, asked.message] : []);
    try {
      const body = { ...asked.body, ...WATCHING };
      for await (const chunk of events(await call(asked.path, { key, body, signal: abort.signal }))) {
        recording.add(chunk, performance.now());
        this.changed();
      }
      this.#finish(asked);
    } catch (error) {
      const kept = recording.last.forward ? " What arrived before is shown." : "";
      const stopped = abort.signal.aborted;
      if (this.recording === recording) this.#fail(stopped ? "Stopped." : `${error.message}${kept}`);
    }
    if (this.abort === abort) this.abort = null;
    this.changed();
  }

  get running() {
    return Boolean(this.abort);
  }

  /** Show the conversation, with room for the answer to `asked`. */
  #open(shown) {
    const { model, messages, prompt, suffix, ...policy } = this.asked.body;
    this.reason = "";
    this.drawn = null;
    this.#showTurns(shown);
    this.part("work").hidden = false;
    this.part("failure").hidden = this.part("listing").hidden = true;
    this.part("made").textContent = `${model} \u00b7 ${inWords(policy)}`;
    this.part("said").textContent = "";
  }

  #showTurns(shown) {
    this.shown = shown;
    this.part("turns").replaceChildren(...shown.map(turn));
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
    this.reason = this.part("reason").textContent = reason;
    this.part("failure").hidden = false;
  }

  /** Show the state after `forward` forwards, on a colour scale that ends at `total`. */
  show(forward, total) {
    const { recording } = this;
    if (!recording) return;
    const frame = recording.frameAt(forward);
    const isEnd = frame === recording.frames.length - 1;
    const state = isEnd ? this.state : "denoising";
    const drawn = [frame, total, state, recording.frames.length, recording.text.length].join();
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    this.part("work").dataset.state = this.part("state").textContent = state;
    this.#showAnswer(frame, state);
    this.canvas.show(recording, frame, total);
    for (const [name, value] of Object.entries(recording.numbersAt(frame))) {
      const digits = name === "tokensPerForward" ? 2 : 0;
      this.part(name).textContent = value === null ? "\u2013" : value.toFixed(digits);
    }
    this.part("scale").textContent = total;
    this.part("warnings").textContent = recording.warnings.join(" ");
    this.part("effort").hidden = recording.frames[0].size === 0; // nothing has arrived
  }

  /** Show what is final, then what else the canvas holds; all that arrived has its room. */
  #showAnswer(frame, state) {
    const { before = "", after = "" } = this.asked.given;
    const own = this.asked.message ? null : "mark";
    const { recording } = this;
    const around = (...texts) => [[before], ...texts, [after]];
    const all = before + recording.text + after;
    const isEmpty = state.startsWith("complete") && recording.text === "";
    const final = [isEmpty ? EMPTY : recording.textAt(frame), own];
    const draft = [state === "denoising" ? recording.draftAt(frame) : "", "span"];
    this.part("answer").replaceChildren(...rendered(around(final, draft), isCode(all)));
    this.part("room").replaceChildren(...rendered(around([recording.text]), isCode(all)));
  }

  #summarize() {
    this.part("summary").textContent = inWords(this.policy);
  }

  #showCode(button) {
    for (const each of button.parentElement.children) {
      each.setAttribute("aria-pressed", each === button);
    }
    const url = new URL(".", document.baseURI).href;
    const { path, body, given } = this.asked;
    const program = code[button.dataset.language]({ url, path, body, hasKey: given.hasKey });
    this.part("code").textContent = program;
    this.part("listing").hidden = false;
  }
}

function turn({ role, content }) {
  const isUser = role === "user";
  const who = element("span", { className: "unseen" }, isUser ? "You: " : "Model: ");
  const said = isUser ? [content] : rendered([[content || EMPTY]]);
  return element("li", { className: role }, who, element("div", {}, ...said));
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
