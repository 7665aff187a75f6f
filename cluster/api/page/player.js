/** The transport: plays, pauses and scrubs through the forwards of all panes at once. */

export class Player {
  /** @param {HTMLElement} root @param {(forward: number) => void} show */
  constructor(root, show) {
    this.root = root;
    const part = (name) => root.querySelector(`[name=${name}]`);
    this.slider = part("position");
    this.button = part("play");
    this.pace = part("pace");
    this.where = root.querySelector("output");
    this.show = show;
    this.end = 0; // the last forward that was received
    this.growing = false; // whether more will arrive
    this.position = 0;
    this.playing = false;
    this.button.addEventListener("click", () => this.#toggle());
    part("back").addEventListener("click", () => this.#goTo(Math.ceil(this.position) - 1));
    part("forth").addEventListener("click", () => this.#goTo(Math.floor(this.position) + 1));
    this.slider.addEventListener("input", () => this.#goTo(Number(this.slider.value)));
    this.#play(false);
  }

  /** Start at the empty canvas, and play forwards as they arrive. */
  restart() {
    this.position = this.end = 0;
    this.growing = true;
    this.#play(true);
  }

  /** Show the last forward received. */
  skip() {
    this.#goTo(this.end);
  }

  /** Note the last forward received, and whether more will arrive. */
  received(end, growing) {
    this.end = end;
    this.growing = growing;
    this.position = Math.min(this.position, end);
    this.#draw();
  }

  #toggle() {
    if (!this.playing && !this.growing && this.position >= this.end) this.position = 0;
    this.#play(!this.playing);
  }

  #goTo(forward) {
    this.position = Math.min(Math.max(forward, 0), this.end);
    this.#play(false);
  }

  #play(playing) {
    const begins = playing && !this.playing;
    this.playing = playing;
    this.button.textContent = playing ? "Pause" : "Play";
    this.#draw();
    if (begins) requestAnimationFrame((now) => this.#tick(now, now));
  }

  #tick(now, before) {
    if (!this.playing) return;
    const pace = Number(this.pace.value); // forwards per second; 0: as they arrive
    const next = pace ? this.position + (pace * (now - before)) / 1000 : this.end;
    this.position = Math.min(next, this.end);
    this.#draw();
    if (this.position >= this.end && !this.growing) this.#play(false);
    else requestAnimationFrame((later) => this.#tick(later, now));
  }

  #draw() {
    const forward = Math.floor(this.position);
    if (this.end || !this.growing) this.root.hidden = this.end === 0; // nothing to play
    this.slider.max = this.end;
    this.slider.value = forward;
    this.slider.setAttribute("aria-valuetext", `forward ${forward} of ${this.end}`);
    this.where.textContent = `${forward} / ${this.end}`;
    this.show(forward);
  }
}
