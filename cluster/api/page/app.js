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
const POLICIES = [{}, { max_tokens: 96, diffusion: { decoder: { kind: "fixed", steps: 32 } } }];
const GAPS = [
  `First 4*7=28. Then 28-9=${GAP}. The answer is 19.`,
  `First 4*7=${GAP}. Then 28-9=19. The answer is 19.`,
];

const KEPT = `diffray chat 1 ${location.pathname}`; // in sessionStorage: over a reload, in this tab

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

/** Show as many panes; each has its policy above it, a single one in the composer. */
function setPanes(number, policies = POLICIES) {
  while (panes.length > number) {
    const pane = panes.pop();
    pane.clear();
    pane.settings.remove();
  }
  while (panes.length < number) {
    const pane = new Pane(changed, again);
    pane.turns = panes[0]?.turns ?? [];
    offer(pane, policies[panes.length]);
    panes.push(pane);
  }
  for (const [index, pane] of panes.entries()) {
    pane.rename(number > 1 ? "AB"[index] : "");
    pane.settings.open = false;
    if (number > 1) pane.root.prepend(pane.settings);
    else $("send").before(pane.settings);
  }
  $("compare").checked = number > 1;
  $("panes").replaceChildren(...panes.map((pane) => pane.root));
  document.body.classList.toggle("two", number > 1);
  changed();
}

function again(pane) {
  player.restart();
  pane.run(pane.ask($("model").value, { ...pane.asked.given, hasKey: key !== "" }), key);
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
    $("key").hidden = true;
    prompt.focus();
  } catch (error) {
    const isLocked = error.status === 401;
    $("notice").textContent = isLocked && !key ? "This server needs an API key." : error.message;
    $("key").hidden = !isLocked;
    if (isLocked) $("key").querySelector("input").focus();
  }
}

async function loadFields(policies) {
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
  panes.forEach((pane, index) => offer(pane, policies[index]));
}

function inOrder(given, names) {
  const rank = ({ name }) => (names.includes(name) ? names.indexOf(name) : names.length);
  return given.toSorted((one, other) => rank(one) - rank(other));
}

/** Show what to try; an example begins a new chat, as it is a question of its own. */
function showExamples() {
  const { description = "", examples = [] } = models.get($("model").value) ?? {};
  const isNew = panes.every((pane) => pane.asked === null);
  const isInfill = task.value === "infill";
  const buttons = (isInfill ? GAPS : examples).map((text) => {
    const button = element("button", { type: "button", title: text }, text);
    button.addEventListener("click", () => {
      prompt.value = text;
      size.value = size.defaultValue;
      prompt.focus();
    });
    return button;
  });
  document.body.classList.toggle("new", isNew);
  $("about").textContent = description;
  const heading = element("h2", {}, isNew || isInfill ? "Try" : "Try in a new chat");
  $("examples").replaceChildren(heading, ...buttons);
  $("examples").hidden = buttons.length === 0;
  if (isNew) composer.after($("examples"));
  else composer.before($("examples"));
}

function send() {
  const parts = prompt.value.split(GAP);
  if (task.value === "infill" && parts.length !== 2) {
    $("notice").textContent = `Mark one gap in the text; it is written ${GAP}.`;
    return;
  }
  const [before, after] = task.value === "infill" ? parts : [];
  const given = { text: prompt.value, before, after, gap: Number(size.value), hasKey: key !== "" };
  $("notice").textContent = "";
  player.restart();
  const { examples = [] } = models.get($("model").value);
  for (const pane of panes) {
    if (examples.includes(prompt.value)) pane.clear();
    pane.run(pane.ask($("model").value, given), key);
  }
  if (task.value === "chat") prompt.value = "";
  showExamples();
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
composer.addEventListener("change", ({ target }) => {
  if (target !== composer && target.name !== "task") return;
  $("gap").hidden = task.value !== "infill";
  prompt.placeholder = task.value === "infill" ? `A text with one ${GAP}` : "Ask the model";
  showExamples();
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
  prompt.focus();
});
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = event.target.querySelector("input").value.trim();
  offered = load();
});
addEventListener("click", ({ target }) => {
  for (const { settings } of panes) if (!settings.contains(target)) settings.open = false;
});
addEventListener("keydown", ({ key: pressed }) => {
  const open = pressed === "Escape" && document.querySelector(".policy[open] summary");
  if (!open) return;
  open.focus();
  open.click();
});

/** Load what the server offers, and show the chat that a reload has interrupted. */
async function begin() {
  const before = kept();
  const policies = POLICIES.map((policy, index) => before?.panes[index]?.policy ?? policy);
  document.body.classList.toggle("new", !before?.panes[0].asked);
  setPanes(before?.panes.length ?? 1, policies);
  await Promise.all([load(), loadFields(policies)]);
  if (models.has(before?.model)) $("model").value = before.model;
  adapt();
  addEventListener("pagehide", keep);
  if (!before) return;
  setTask(before.task);
  prompt.value ||= before.text; // what was typed meanwhile stays
  panes.forEach((pane, index) => pane.restore(before.panes[index]));
  showExamples();
  changed();
  player.skip();
}

/** Keep the chat, if the browser allows it and has room; else none rather than an older one. */
function keep() {
  const composed = { model: $("model").value, task: task.value, text: prompt.value };
  try {
    sessionStorage.removeItem(KEPT);
    const chat = { ...composed, panes: panes.map((pane) => pane.kept) };
    sessionStorage.setItem(KEPT, JSON.stringify(chat));
  } catch {}
}

function kept() {
  try {
    return JSON.parse(sessionStorage.getItem(KEPT));
  } catch {
    return null;
  }
}

offered = begin();
