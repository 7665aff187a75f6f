/** The page: models, panes, and the prompt that they share. */

import { element } from "./controls.js";
import { Pane } from "./pane.js";
import { Player } from "./player.js";
import { acceptedBy } from "./policy.js";
import { fieldsOf } from "./schema.js";
import { call } from "./stream.js";

const GAP = "[gap]";
const SAMPLING = ["max_tokens", "temperature", "seed", "top_p"];
const FIRST = ["decoder", "cache", "block_length"]; // shown before the other fields of diffusion
const TOKENS = 96; // initially
const POLICIES = [{}, { decoder: { kind: "fixed", steps: 32 } }]; // of the panes, initially

const $ = (id) => document.getElementById(id);
const composer = $("composer");
const { prompt, task, size } = composer.elements;

let key = ""; // in memory only
let fields = null; // of requests, as the server's OpenAPI document describes them
let panes = [];
let models = new Map(); // as the server lists them, by name
let offered = null; // a promise of both

const player = new Player($("player"), show);

function show(forward) {
  const total = Math.max(...panes.map((pane) => pane.recording?.last.forward ?? 0), 1);
  for (const pane of panes) pane.show(forward, total);
}

function changed() {
  const last = panes.map((pane) => pane.recording?.last.forward ?? 0);
  const running = panes.some((pane) => pane.running);
  player.received(Math.max(...last), running);
  $("send").textContent = running ? "Stop" : "Send";
}

function setPanes(number) {
  while (panes.length > number) panes.pop().clear();
  while (panes.length < number) {
    const pane = new Pane(changed, again);
    pane.turns = panes[0]?.turns ?? [];
    offer(pane, { max_tokens: TOKENS, diffusion: POLICIES[panes.length] });
    panes.push(pane);
  }
  for (const [index, pane] of panes.entries()) {
    pane.rename(number > 1 ? "AB"[index] : "");
    const isWide = number === 1 && matchMedia("(min-width: 60rem)").matches;
    pane.part("policy").open = isWide;
  }
  $("panes").replaceChildren(...panes.map((pane) => pane.root));
  panes[0].part("talk").prepend($("examples"));
  $("panes").classList.toggle("two", number > 1);
  changed();
}

function again(pane) {
  player.restart();
  pane.run(pane.ask($("model").value, { ...pane.asked.given, key }));
}

/** Show a pane's controls for what the chosen model accepts, with the values of a policy. */
function offer(pane, policy) {
  if (!fields) return;
  const diffusion = acceptedBy(models.get($("model").value), fields.diffusion);
  pane.setControls(fields.sampling, diffusion, policy);
}

/** Adapt controls, tasks and examples to the chosen model. */
function adapt() {
  for (const pane of panes) offer(pane, pane.policy);
  const infill = composer.querySelector("[value=infill]");
  infill.disabled = models.get($("model").value)?.accepts?.suffix === false;
  infill.parentElement.title = infill.disabled ? "This model sees no text after a gap" : "";
  if (infill.disabled) setTask("chat");
  showExamples();
}

function setTask(name) {
  task.value = name;
  composer.dispatchEvent(new Event("change"));
}

/** Load the list of models; the server may refuse it without a key. */
async function load() {
  try {
    const { data } = await (await call("v1/models", { key })).json();
    $("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
    models = new Map(data.map((model) => [model.id, model]));
    adapt();
    $("notice").textContent = "";
  } catch (error) {
    const isLocked = error.status === 401;
    $("notice").textContent = isLocked && !key ? "This server needs an API key." : error.message;
    $("key").hidden = !isLocked && $("key").hidden;
  }
}

async function loadFields() {
  try {
    const document = await (await call("openapi.json")).json();
    const { ChatBody, DiffusionParams } = document.components.schemas;
    const body = fieldsOf(ChatBody, document).filter(({ name }) => SAMPLING.includes(name));
    fields = {
      sampling: inOrder(body, SAMPLING),
      diffusion: inOrder(fieldsOf(DiffusionParams, document), FIRST),
    };
  } catch (error) {
    $("docs").hidden = true; // the document is not published: requests use the server's defaults
  }
  panes.forEach((pane, index) => offer(pane, { max_tokens: TOKENS, diffusion: POLICIES[index] }));
}

function inOrder(given, names) {
  const rank = ({ name }) => (names.includes(name) ? names.indexOf(name) : names.length);
  return given.toSorted((one, other) => rank(one) - rank(other));
}

function showExamples() {
  const { description, examples = [] } = models.get($("model").value) ?? {};
  const buttons = examples.map((text) => {
    const button = element("button", { type: "button" }, text);
    button.addEventListener("click", () => {
      setTask("chat");
      prompt.value = text;
      prompt.focus();
    });
    return button;
  });
  const about = description ? [element("p", {}, description)] : [];
  $("examples").replaceChildren(...about, element("h2", {}, "Try"), ...buttons);
  $("examples").hidden = buttons.length === 0 || panes.some((pane) => pane.recording);
}

function send() {
  const parts = prompt.value.split(GAP);
  if (task.value === "infill" && parts.length !== 2) {
    $("notice").textContent = `Mark one gap in the text; it is written ${GAP}.`;
    return;
  }
  const [before, after] = task.value === "infill" ? parts : [];
  const given = { key, text: prompt.value, before, after, gap: Number(size.value) };
  $("notice").textContent = "";
  $("examples").hidden = true;
  player.restart();
  for (const pane of panes) pane.run(pane.ask($("model").value, given));
  if (task.value === "chat") prompt.value = "";
  panes[0].part("turns").lastElementChild?.scrollIntoView();
  changed();
}

/** Replace the selection by a gap of as many tokens. */
async function markGap() {
  const selected = prompt.value.slice(prompt.selectionStart, prompt.selectionEnd);
  const { selectionStart: start, selectionEnd: end } = prompt;
  prompt.value = prompt.value.replaceAll(GAP, (found, at) => (at >= start && at < end ? found : ""));
  prompt.setRangeText(GAP, start, end, "end");
  prompt.focus();
  if (selected.trim() === "") return;
  const body = { model: $("model").value, prompt: selected, add_special_tokens: false };
  try {
    size.value = (await (await call("tokenize", { key, body })).json()).count;
  } catch (error) {
    $("notice").textContent = error.message;
  }
}

composer.addEventListener("submit", async (event) => {
  event.preventDefault();
  const running = () => panes.some((pane) => pane.running);
  if (running()) return panes.forEach((pane) => pane.stop());
  await offered; // until then there is no model to name
  if (!running() && $("model").value && prompt.value.trim()) send();
});
composer.addEventListener("change", () => {
  $("gap").hidden = task.value !== "infill";
  prompt.placeholder = task.value === "infill" ? `A text with one ${GAP}` : "Ask the model";
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    composer.requestSubmit();
  }
});
$("mark").addEventListener("click", markGap);
$("model").addEventListener("change", adapt);
$("compare").addEventListener("change", (event) => setPanes(event.target.checked ? 2 : 1));
$("clear").addEventListener("click", () => {
  for (const pane of panes) pane.clear();
  prompt.value = $("notice").textContent = "";
  showExamples();
  changed();
});
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = event.target.querySelector("input").value.trim();
  offered = load();
});

$("compare").checked = false; // browsers restore it on reload
setPanes(1);
offered = Promise.all([load(), loadFields()]);
