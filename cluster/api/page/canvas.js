/** The canvas: a grid with one cell per position, so that nothing moves while tokens appear. */

import { element } from "./controls.js";

let count = 0; // of ids

export class Canvas {
  /** @param {HTMLElement} grid @param {HTMLElement} note - where the selected cell is described */
  constructor(grid, note) {
    this.grid = grid;
    this.note = note;
    this.cells = [];
    this.selected = -1;
    grid.addEventListener("pointerover", (event) => this.#select(this.cells.indexOf(event.target)));
    grid.addEventListener("focus", () => this.#select(Math.max(this.selected, 0)));
    grid.addEventListener("keydown", (event) => this.#move(event));
  }

  /** Show a frame of a recording; `total` is the forward at the end of the colour scale. */
  show(recording, frame, total) {
    this.recording = recording;
    this.frame = frame;
    const { final, forward, size } = recording.frames[frame];
    this.#resize(size);
    const summary = `Canvas: ${final} of ${size} tokens final after ${forward} forward${forward === 1 ? "" : "s"}`;
    this.grid.setAttribute("aria-label", summary);
    const end = recording.endAt(frame);
    this.cells.forEach((cell, position) => this.#draw(cell, position, total, position >= end));
    this.#describe();
  }

  #resize(length) {
    while (this.cells.length > length) this.cells.pop().remove();
    while (this.cells.length < length) {
      const cell = element("div", { id: `cell-${++count}`, className: "cell", role: "option" });
      this.cells.push(cell);
      this.grid.append(cell);
    }
  }

  #draw(cell, position, total, isBeyond) {
    const found = this.recording.cell(position, this.frame);
    const since = found?.isDraft ? "draft" : `forward ${found?.forward}`;
    const state = found ? `${found.text}, ${since}` : "mask";
    const key = `${isBeyond} ${total} ${state}`;
    if (cell.dataset.key === key) return;
    cell.dataset.key = key;
    cell.textContent = !found || isBeyond ? "" : visible(found.text);
    cell.classList.toggle("final", found !== null && !found.isDraft);
    cell.classList.toggle("draft", found !== null && found.isDraft);
    cell.classList.toggle("beyond", isBeyond);
    if (found) cell.style.setProperty("--time", (found.forward - 1) / Math.max(total - 1, 1));
    cell.setAttribute("aria-label", `${position + 1}: ${state}`);
  }

  #move(event) {
    const columns = getComputedStyle(this.grid).gridTemplateColumns.split(" ").length;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    const step = steps[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const target = this.selected + step;
    if (target >= 0 && target < this.cells.length) this.#select(target);
  }

  #select(position) {
    if (position < 0 || position >= this.cells.length) return;
    this.cells[this.selected]?.setAttribute("aria-selected", "false");
    this.selected = position;
    this.cells[position].setAttribute("aria-selected", "true");
    this.grid.setAttribute("aria-activedescendant", this.cells[position].id);
    this.#describe();
  }

  #describe() {
    if (this.selected < 0 || this.selected >= this.cells.length) return;
    const found = this.recording.cell(this.selected, this.frame);
    const parts = [`Position ${this.selected + 1}`];
    if (found === null) parts.push("mask");
    else parts.push(`\u201c${visible(found.text)}\u201d`, sinceWhen(found));
    if (found !== null && !found.isDraft && found.probability !== null) {
      parts.push(`probability ${found.probability.toFixed(3)}`);
    }
    this.note.textContent = parts.join(" \u00b7 ");
  }
}

/** Return when a token became final, and what was drafted in its place. */
function sinceWhen({ text, forward, isDraft, drafted }) {
  if (isDraft) return `draft of forward ${forward}`;
  const final = `final at forward ${forward}`;
  if (drafted === null) return final;
  return `${final}, ${drafted === text ? "as drafted" : `drafted as \u201c${visible(drafted)}\u201d`}`;
}

/** Return a token's text with symbols for invisible white space. */
function visible(text) {
  if (text.trim() === "" && text !== "") text = text.replaceAll(" ", "\u2423");
  return text.replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5");
}
