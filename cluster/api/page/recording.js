/** One answer as it was received: what each position of the canvas held after each forward. */

const ENDS = /^(<\|.*\||<\/s|<eos|<end_of_turn)>$/; // end tokens as models write them

/**
 * @typedef {{forward: number, final: number, seconds: number, length: number, size: number,
 *   draft: string}} Frame
 *   The state after a forward: final tokens, time since the request, length of the final text,
 *   size of the canvas, and its whole text with a symbol for each mask.
 * @typedef {{text: string, forward: number, probability: number | null, isDraft: boolean,
 *   drafted: string | null}} Cell
 *   What a position holds: a final token or a draft, since which forward, and the draft before it.
 */
export class Recording {
  constructor(now) {
    this.began = now;
    /** @type {Frame[]} */
    this.frames = [{ forward: 0, final: 0, seconds: 0, length: 0, size: 0, draft: "" }];
    this.positions = []; // each position's changes: {frame, forward, text, isDraft}
    this.probabilities = [];
    this.text = "";
    this.finish = null; // why the answer ended
    this.totals = null; // the server's own count, at the end
    this.warnings = []; // what the server changed or ignored
  }

  get last() {
    return this.frames[this.frames.length - 1];
  }

  /** Add a chunk of the stream, received at `now` milliseconds. */
  add(chunk, now) {
    if (chunk.diffusion?.tokens) this.#addCanvas(chunk.diffusion, now);
    this.warnings.push(...(chunk.warnings ?? []));
    for (const choice of chunk.choices) {
      this.text += choice.delta?.content ?? choice.text ?? "";
      this.probabilities.push(...(choice.trajectory?.logprobs ?? []).map(Math.exp));
      this.finish = choice.finish_reason ?? this.finish;
    }
    this.last.length = this.text.length;
    if (chunk.usage) {
      this.totals = {
        tokens: chunk.usage.completion_tokens,
        cached: chunk.usage.prompt_tokens_details.cached_tokens,
        forwards: chunk.diffusion.forwards,
        seconds: (now - this.began) / 1000,
      };
    }
  }

  #addCanvas({ forwards, tokens, text = "", drafts = 0 }, now) {
    const forward = Math.max(forwards, this.last.forward);
    const seconds = (now - this.began) / 1000;
    if (forward > this.last.forward) this.frames.push({ forward, seconds });
    const final = tokens.filter((token) => token !== null).length - drafts;
    Object.assign(this.last, { final, size: tokens.length, draft: text });
    this.frames[0].size ||= tokens.length;
    tokens.forEach((token, position) => {
      const changes = (this.positions[position] ??= []);
      const { text = null, isDraft = false } = changes.at(-1) ?? {};
      const isOpen = drafts > 0 && token !== null && position >= final;
      if (token === text && isOpen === isDraft) return;
      changes.push({ frame: this.frames.length - 1, forward, text: token, isDraft: isOpen });
    });
  }

  /** Return the index of the frame that shows the canvas after `forward` forwards. */
  frameAt(forward) {
    const next = this.frames.findIndex((frame) => frame.forward > forward);
    return (next === -1 ? this.frames.length : next) - 1;
  }

  /** Return what a position holds in a frame; null for a mask. @returns {Cell | null} */
  cell(position, frame) {
    const changes = this.positions[position] ?? [];
    const at = changes.findLastIndex((each) => each.frame <= frame);
    if (at === -1 || changes[at].text === null) return null;
    const earlier = changes.slice(0, at).findLast((each) => each.isDraft);
    const probability = this.probabilities[position] ?? null;
    return { ...changes[at], probability, drafted: earlier?.text ?? null };
  }

  #finalBefore(end, frame) {
    const isFinal = (_, at) => this.cell(at, frame)?.isDraft === false;
    return this.positions.slice(0, end).filter(isFinal).length;
  }

  /** Return the text that was final in a frame. */
  textAt(frame) {
    return this.text.slice(0, this.frames[frame].length);
  }

  /** Return the text of the canvas that follows what was final, without the masks at its end. */
  draftAt(frame) {
    const { draft, length } = this.frames[frame];
    return draft.startsWith(this.textAt(frame)) ? draft.slice(length).replace(/\u2591+$/, "") : "";
  }

  /** Return where the answer ends on a frame's canvas, as far as that is known there. */
  endAt(frame) {
    const isEnd = (_, position) => {
      const cell = this.cell(position, frame);
      return cell !== null && !cell.isDraft && ENDS.test(cell.text);
    };
    const end = this.positions.findIndex(isEnd);
    const isLast = this.totals !== null && frame === this.frames.length - 1;
    return end !== -1 ? end : isLast ? this.totals.tokens : this.positions.length;
  }

  /**
   * Return the numbers of a frame; those of the last one are the server's. Tokens after the
   * answer's end do not count once the end is known.
   */
  numbersAt(frame) {
    const { forward, final, seconds } = this.frames[frame];
    const isEnd = this.totals !== null && frame === this.frames.length - 1;
    const tokens = this.totals === null ? final : this.#finalBefore(this.totals.tokens, frame);
    const counted = isEnd ? this.totals : { tokens, forwards: forward, seconds };
    return {
      forwards: counted.forwards,
      tokensPerForward: counted.forwards ? counted.tokens / counted.forwards : null,
      tokensPerSecond: counted.seconds ? counted.tokens / counted.seconds : null,
      cached: this.totals?.cached ?? null,
    };
  }
}
