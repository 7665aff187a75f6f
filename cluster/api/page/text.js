/** The look of a text: code in a monospaced font, masks as bars, everything else as it is. */

import { element } from "./controls.js";

const MASK = "\u2591"; // the server's symbol
const CODE =
  /^\s*([{[]\s*["{[\]}]|(async )?(def|class|function) \w|import \w|from \S+ import |(const|let|var) \w+ =|#include)/;
const MARKED = /```[^\n]*\n([^]*?)(?:\n?```\n?|$)|`([^`\n]+)`/dg; // a block may lack its end yet

/** Return whether a text is code that is not marked as such. */
export function isCode(text) {
  return CODE.test(text) && !text.includes("```");
}

/** Cut a text into [tag, start, stop]; the marks of code are left out. */
export function partsOf(text, isAllCode = isCode(text)) {
  if (isAllCode) return [["pre", 0, text.length]];
  const parts = [];
  let end = 0;
  for (const { index, indices } of text.matchAll(MARKED)) {
    const [[, stop], block, inline] = indices;
    parts.push(["span", end, index], block ? ["pre", ...block] : ["code", ...inline]);
    end = stop;
  }
  return [...parts, ["span", end, text.length]].filter(([, start, stop]) => start < stop);
}

/** Return elements for texts that follow each other, each in an inner tag of its own or in none. */
export function rendered(texts, isAllCode) {
  const whole = texts.map(([text]) => text).join("");
  return partsOf(whole, isAllCode).map(([tag, start, stop]) => {
    let at = 0;
    const inner = texts.flatMap(([text, own]) => {
      const cut = text.slice(Math.max(start - at, 0), Math.max(stop - at, 0));
      at += text.length;
      return cut === "" ? [] : own ? [element(own, {}, ...withMasks(cut))] : [cut];
    });
    return element(tag, {}, ...inner);
  });
}

function withMasks(text) {
  return text.split(new RegExp(`(${MASK})`)).map((each) => (each === MASK ? element("i") : each));
}
