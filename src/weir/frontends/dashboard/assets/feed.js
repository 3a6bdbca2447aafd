// Asks the server for what is new, once a second, while the page is looked at and not paused.

const EVERY = 1000;
const SLOWEST = 8000; // between tries while the server does not answer
const PATIENCE = 10000; // for one answer

export class Feed {
  #timer = null;
  #asking = null;
  #failures = 0;
  #life = "";
  #last = 0;
  paused = false;

  /** `told` is called with each answer, `failed` when there is none. */
  constructor(told, failed) {
    this.told = told;
    this.failed = failed;
    document.addEventListener("visibilitychange", () => this.#wake());
  }

  start() {
    this.#wake();
  }

  pause(paused) {
    this.paused = paused;
    if (paused) {
      this.#asking?.abort();
      clearTimeout(this.#timer);
    } else this.#wake();
  }

  get #idle() {
    return this.paused || document.hidden;
  }

  #wake() {
    clearTimeout(this.#timer);
    if (!this.#idle && !this.#asking) this.#ask();
  }

  async #ask() {
    const asking = new AbortController();
    this.#asking = asking;
    const limit = setTimeout(() => asking.abort(), PATIENCE);
    let wait = EVERY;
    try {
      const query = new URLSearchParams({ life: this.#life, since: this.#last });
      const answer = await fetch(`dashboard/data?${query}`, { signal: asking.signal, cache: "no-store" });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const told = await answer.json();
      if (!this.paused) {
        this.#life = told.life;
        this.#last = told.last;
        this.#failures = 0;
        if (told.more) wait = 0;
        this.told(told);
      }
    } catch (error) {
      if (!this.paused) {
        this.#failures += 1;
        wait = Math.min(SLOWEST, EVERY * 2 ** (this.#failures - 1));
        this.failed(error);
      }
    }
    clearTimeout(limit);
    this.#asking = null;
    if (!this.#idle) this.#timer = setTimeout(() => this.#wake(), wait);
  }
}
