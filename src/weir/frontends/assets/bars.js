// Horizontal bars, each with its name and its number beside it: no legend, and no colour that has to be told apart.

import { make, mark, say } from "./elements.js";

export class Bars {
  /** A list of bars called `title`. */
  constructor(title, note) {
    this.rows = new Map();
    this.body = make("tbody");
    const caption = make("caption", { class: "hidden" }, title);
    const heads = ["", "", "Share"].map((head) => make("th", { scope: "col" }, head));
    say(heads[0], title);
    this.table = make("table", { class: "bars" }, caption, make("thead", { class: "hidden" }, make("tr", {}, ...heads)), this.body);
    this.empty = make("p", { class: "quiet" }, "nothing in the time shown");
    this.note = make("p", { class: "quiet" }, note ?? "");
    this.element = make("section", { class: "card" }, make("h3", {}, title), this.table, this.empty, this.note);
  }

  /** Say what the bars are of. */
  say(note) {
    say(this.note, note);
  }

  /** Show `bars`, {name, value, text, title?}; each as wide as its part of the largest. */
  show(bars) {
    const largest = Math.max(...bars.map(({ value }) => value), 0);
    this.table.hidden = !largest;
    this.empty.hidden = largest > 0;
    const names = new Set(bars.map(({ name }) => name));
    for (const [name, row] of this.rows) {
      if (!names.has(name)) {
        row.remove();
        this.rows.delete(name);
      }
    }
    for (const [index, bar] of bars.entries()) {
      const row = this.rows.get(bar.name) ?? this.#row(bar);
      if (this.body.children[index] !== row) this.body.insertBefore(row, this.body.children[index] ?? null);
      const [, drawn, text] = row.children;
      const length = largest ? (100 * bar.value) / largest : 0;
      drawn.firstChild.style.width = `${length.toFixed(2)}%`;
      mark(row, "data-none", bar.value ? null : "");
      say(text, bar.text);
    }
  }

  #row({ name, about }) {
    const head = make("th", { scope: "row" }, name);
    if (about) head.append(make("span", { class: "quiet about" }, ` ${about}`));
    const row = make("tr", {}, head, make("td", { class: "drawn" }, make("span", { class: "fill" })), make("td", { class: "number" }));
    this.rows.set(name, row);
    this.body.append(row);
    return row;
  }
}
