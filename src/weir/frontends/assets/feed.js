// Requests new samples from the server once a second, while the page is visible and not paused.

const EVERY = 1000;
const SLOWEST = 8000; // between tries while the server does not answer
const PATIENCE = 10000; // for one answer

export class Feed {
  #timer = null;
  #request = null;
  #failures = 0;
  #life = "";
  #last = 0;
  paused = false;

  /** `updated` is called with each answer, `failed` when there is none. */
  constructor(updated, failed) {
    this.updated = updated;
    this.failed = failed;
    document.addEventListener("visibilitychange", () => this.#wake());
  }

  start() {
    this.#wake();
  }

  pause(paused) {
    this.paused = paused;
    if (paused) {
      this.#request?.abort();
      clearTimeout(this.#timer);
    } else this.#wake();
  }

  get #idle() {
    return this.paused || document.hidden;
  }

  #wake() {
    clearTimeout(this.#timer);
    if (!this.#idle && !this.#request) this.#fetch();
  }

  async #fetch() {
    const request = new AbortController();
    this.#request = request;
    const limit = setTimeout(() => request.abort(), PATIENCE);
    let wait = EVERY;
    try {
      const query = new URLSearchParams({ life: this.#life, since: this.#last });
      const answer = await fetch(`dashboard/data?${query}`, { signal: request.signal, cache: "no-store" });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const data = await answer.json();
      if (!this.paused) {
        this.#life = data.life;
        this.#last = data.last;
        this.#failures = 0;
        if (data.more) wait = 0;
        this.updated(data);
      }
    } catch (error) {
      if (!this.paused) {
        this.#failures += 1;
        wait = Math.min(SLOWEST, EVERY * 2 ** (this.#failures - 1));
        this.failed(error);
      }
    }
    clearTimeout(limit);
    this.#request = null;
    if (!this.#idle) this.#timer = setTimeout(() => this.#wake(), wait);
  }
}
