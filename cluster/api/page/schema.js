/** The fields of a request as the OpenAPI document describes them. */

/**
 * @typedef {{name: string, title: string, help: string, default: any} & (
 *   {type: "number" | "integer", minimum?: number, maximum?: number} |
 *   {type: "boolean" | "string"} |
 *   {type: "choice", choices: any[]} |
 *   {type: "parts", parts: Map<string, Field[]>})} Field
 *   "parts" is an object whose `kind` decides which fields it has.
 */

/** Return the fields of an object's schema, without those that no simple control can set. */
export function fieldsOf(schema, document) {
  const { properties = {} } = resolve(schema, document);
  return Object.entries(properties)
    .filter(([name]) => name !== "kind")
    .map(([name, about]) => fieldOf(name, about, document))
    .filter((field) => field !== null);
}

/** @returns {Field | null} */
function fieldOf(name, about, document) {
  const options = (about.anyOf ?? [about]).filter((each) => each.type !== "null");
  const union = options.find((each) => each.oneOf); // listed next to the bare names of its kinds
  const found = union ?? (options.length === 1 ? resolve(options[0], document) : {});
  const field = {
    name,
    title: name.replaceAll("_", " "),
    help: about.description ?? "",
    default: about.default ?? null,
  };
  if (found.oneOf) {
    const parts = found.oneOf.map((part) => {
      const { properties } = resolve(part, document);
      return [properties.kind.const, fieldsOf(part, document)];
    });
    return { ...field, type: "parts", parts: new Map(parts) };
  }
  if (found.enum) return { ...field, type: "choice", choices: found.enum };
  if (found.type === "number" || found.type === "integer") {
    const { type, minimum = found.exclusiveMinimum, maximum = found.exclusiveMaximum } = found;
    return { ...field, type, minimum, maximum };
  }
  return ["boolean", "string"].includes(found.type) ? { ...field, type: found.type } : null;
}

function resolve(schema, document) {
  if (!schema.$ref) return schema;
  return schema.$ref.slice(2).split("/").reduce((found, name) => found[name], document);
}
