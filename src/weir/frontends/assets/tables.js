// Tables whose rows stay where they are while their numbers change, so that focus and selection survive.

import { make, mark, say } from "./elements.js";
import { percent } from "./format.js";

export class Table {
  /** `columns` are {head, number?, title?}. */
  constructor(caption, columns) {
    this.columns = columns;
    this.rows = new Map();
    this.told = []; // by column
    this.body = make("tbody");
    this.heads = columns.map(({ head, number }) => make("th", { scope: "col", class: number ? "number" : null }, head));
    this.table = make(
      "table", {}, make("caption", { class: "hidden" }, caption), make("thead", {}, make("tr", {}, ...this.heads)), this.body,
    );
    this.empty = make("p", { class: "quiet" });
    this.element = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, this.table, this.empty);
  }

  /** Call a column something else. */
  call(column, head) {
    say(this.heads[column], head);
  }

  /** Show `rows`, {key, cells}: a cell is text, or {text, mood}, or {text, press}: a button that calls `press`, or {share}: a bar. */
  show(rows, nothing) {
    this.table.hidden = !rows.length;
    this.empty.hidden = rows.length > 0;
    say(this.empty, nothing);
    const keys = new Set(rows.map(({ key }) => key));
    for (const [key, row] of this.rows) {
      if (!keys.has(key)) {
        row.remove();
        this.rows.delete(key);
      }
    }
    rows.forEach(({ key, cells }, index) => {
      let row = this.rows.get(key);
      if (!row) {
        row = this.#row(cells);
        this.rows.set(key, row);
      }
      if (this.body.children[index] !== row) this.body.insertBefore(row, this.body.children[index] ?? null);
      cells.forEach((cell, column) => this.#write(row.children[column], cell));
    });
    this.#hideEmpty(rows);
  }

  /** Hide the columns that have said nothing so far, in any row, but that there is nothing, or 0. */
  #hideEmpty(rows) {
    this.heads.forEach((head, column) => {
      this.told[column] ||= !column || rows.some(({ cells }) => !["–", "0"].includes(cells[column]?.text ?? cells[column]));
      const absent = rows.length && !this.told[column] ? "" : null;
      mark(head, "data-absent", absent);
      for (const row of this.body.children) mark(row.children[column], "data-absent", absent);
    });
  }

  #row(cells) {
    return make("tr", {}, ...this.columns.map(({ number }, index) => {
      const cell = make(index ? "td" : "th", { class: number ? "number" : null, scope: index ? null : "row" });
      if (cells[index]?.press) cell.append(make("button", { type: "button", class: "plain" }));
      if (cells[index]?.share !== undefined) cell.append(make("progress", { max: 1 }), " ", make("span", { class: "quiet" }));
      return cell;
    }));
  }

  #write(element, cell) {
    const { text, mood = null, press, pressed, share } = typeof cell === "object" && cell !== null ? cell : { text: cell };
    mark(element, "data-mood", mood);
    if (share !== undefined) {
      mark(element.firstChild, "value", share);
      return say(element.lastChild, percent(share));
    }
    if (!press) return say(element, text);
    const button = element.firstChild;
    say(button, text);
    mark(button, "aria-pressed", Boolean(pressed));
    button.onclick = press;
    return undefined;
  }
}
