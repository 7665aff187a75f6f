/** Form controls for the fields of a request. */

const DEFAULT = "default"; // the server's
let count = 0; // of ids

/** Return an element with properties and children; texts become text nodes, never markup. */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** Controls for some fields; `value` is an object of the fields that are set. */
export class Controls {
  /** @param {import("./schema.js").Field[]} fields */
  constructor(fields, initial = {}) {
    this.root = element("div", { className: "controls" });
    this.made = fields.map((field) => [field.name, control(field, initial[field.name] ?? null)]);
    this.root.append(...this.made.map(([, { root }]) => root));
  }

  get value() {
    const given = this.made.map(([name, each]) => [name, each.value]);
    return Object.fromEntries(given.filter(([, value]) => value !== null));
  }
}

function control(field, initial) {
  switch (field.type) {
    case "parts":
      return partsControl(field, initial);
    case "choice":
      return choiceControl(field, initial);
    case "boolean":
      return choiceControl({ ...field, choices: [true, false] }, initial);
    default:
      return inputControl(field, initial);
  }
}

/** A select of kinds, with controls for the chosen kind's fields, set to their defaults. */
function partsControl(field, initial) {
  const select = selectOf([...field.parts.keys()], initial?.kind ?? null);
  const inner = element("div");
  let controls = new Controls([]);
  const show = (values) => {
    const fields = field.parts.get(select.value) ?? [];
    const defaults = Object.fromEntries(fields.map((each) => [each.name, each.default]));
    controls = new Controls(fields, { ...defaults, ...values });
    inner.replaceChildren(controls.root);
  };
  select.addEventListener("change", () => show({}));
  show(initial ?? {});
  const root = element("div", {}, labelled(field, select), inner);
  return {
    root,
    get value() {
      return select.value ? { kind: select.value, ...controls.value } : null;
    },
  };
}

function choiceControl(field, initial) {
  const select = selectOf(field.choices, initial);
  const chosen = () => field.choices.find((each) => String(each) === select.value) ?? null;
  return { root: labelled(field, select), get value() { return chosen(); } };
}

/** A number or a text; a number with an initial value and narrow bounds also gets a slider. */
function inputControl(field, initial) {
  const isNumber = field.type !== "string";
  const step = field.type === "integer" ? 1 : "any";
  const input = element("input", { type: isNumber ? "number" : "text", placeholder: DEFAULT });
  if (isNumber) Object.assign(input, { step, ...bounds(field) });
  input.value = initial ?? "";
  const root = labelled(field, input);
  if (initial !== null && field.maximum - field.minimum <= 1) {
    const slider = element("input", { type: "range", ...bounds(field), step: 0.01, value: initial });
    slider.setAttribute("aria-label", `${field.title}, slider`);
    slider.addEventListener("input", () => (input.value = slider.value));
    input.addEventListener("input", () => (slider.value = input.value));
    root.append(slider);
  }
  const given = () => (input.value === "" ? null : isNumber ? Number(input.value) : input.value);
  return { root, get value() { return given(); } };
}

function bounds({ minimum = "", maximum = "" }) {
  return { min: minimum, max: maximum };
}

function selectOf(choices, chosen) {
  const select = element("select");
  select.append(new Option(DEFAULT, ""), ...choices.map((each) => new Option(each, each)));
  select.value = chosen ?? "";
  return select;
}

function labelled(field, input) {
  input.id = `field-${++count}`;
  const label = element("label", { htmlFor: input.id, title: field.help }, field.title);
  const root = element("div", { className: "field" }, label, input);
  root.dataset.field = field.name;
  return root;
}
