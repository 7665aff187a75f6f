/** Policies: which of their parts a model accepts, and their description in one line. */

/**
 * Return the fields with only the kinds that `model`, as the server lists it, accepts.
 * @param {import("./schema.js").Field[]} fields
 */
export function acceptedBy(model, fields) {
  return fields.map((field) => {
    const kinds = model?.accepts?.[field.name];
    if (!kinds || field.type !== "parts") return field;
    return { ...field, parts: new Map([...field.parts].filter(([kind]) => kinds.includes(kind))) };
  });
}

/** Return in one line what differs from the server's default, or that `diffusion` does not. */
export function inWords({ diffusion = {}, ...others }) {
  const said = Object.entries({ ...diffusion, ...others }).map(([name, value]) => {
    if (value === null || typeof value !== "object") return setting([name, value]);
    const { kind, ...settings } = value;
    const inner = Object.entries(settings).map(setting).join(", ");
    return setting([name, inner ? `${kind} (${inner})` : kind]);
  });
  if (Object.keys(diffusion).length === 0) said.unshift("the server's default");
  return said.join(" \u00b7 ");
}

function setting([name, value]) {
  return `${name.replaceAll("_", " ")} ${value}`;
}
