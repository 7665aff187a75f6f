// As asked.py, for the clients of Node.js.
export const [URL, MODEL] = process.argv.slice(2);
export const SUM = "What is 12 plus 30?", ANSWER = "12+30=42";
export const FACTS = "Give job and age as JSON: Tom, 53, is a driver from Tokyo.";

export function works(capability, condition) {
  if (!condition) throw new Error(capability);
  console.log(capability);
}
