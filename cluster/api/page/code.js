/** Programs that send a request; they read the API key from the environment. */

/** @typedef {{url: string, path: string, body: object, hasKey: boolean}} Asked */

/** @param {Asked} asked */
export function curl({ url, path, body, hasKey }) {
  return [
    `curl ${quoted(url + path)}`,
    ...(hasKey ? ['  -H "Authorization: Bearer $DIFFRAY_API_KEY"'] : []),
    "  -H 'Content-Type: application/json'",
    `  -d ${quoted(JSON.stringify(body, null, 2))}`,
  ].join(" \\\n");
}

/** Return a text quoted for the shell. */
function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** @param {Asked} asked */
export function python({ url, path, body, hasKey }) {
  const isChat = path.includes("chat");
  const { diffusion, ...others } = body;
  const given = Object.entries(others).map(([name, value]) => `    ${name}=${literal(value)},`);
  if (diffusion) given.push(`    extra_body={"diffusion": ${literal(diffusion)}},`);
  const key = hasKey ? 'os.environ["DIFFRAY_API_KEY"]' : '"none"';
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${url}v1", api_key=${key})`,
    `answer = client.${isChat ? "chat.completions" : "completions"}.create(`,
    ...given,
    ")",
    `print(answer.choices[0].${isChat ? "message.content" : "text"})`,
  ].join("\n");
}

/** @param {Asked} asked */
export function javascript({ url, path, body, hasKey }) {
  const isChat = path.includes("chat");
  return [
    `const response = await fetch("${url}${path}", {`,
    '  method: "POST",',
    "  headers: {",
    '    "Content-Type": "application/json",',
    ...(hasKey ? ["    Authorization: `Bearer ${process.env.DIFFRAY_API_KEY}`,"] : []),
    "  },",
    `  body: JSON.stringify(${JSON.stringify(body, null, 2).replaceAll("\n", "\n  ")}),`,
    "});",
    "const answer = await response.json();",
    `console.log(answer.choices[0].${isChat ? "message.content" : "text"});`,
  ].join("\n");
}

/** Return a value as a Python literal. */
function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  const items = Object.entries(value).map(([name, item]) => `"${name}": ${literal(item)}`);
  return `{${items.join(", ")}}`;
}
