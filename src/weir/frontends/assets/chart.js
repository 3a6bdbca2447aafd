// A line chart of one quantity over the time shown: a scale with its unit, a line for each series, and a table of the same.

import { clock } from "./format.js";
import { draw, make, mark, say } from "./elements.js";

const HEIGHT = 104;
const TOP = 18; // for the highest value of the scale, with its unit
const LEFT = 44; // for its other values
const BOTTOM = 18; // for the times
const ROWS = 15; // of the table

export class Chart {
  /** `series` are {label, line}: line names the colour in the style sheet. `write` returns a value and its unit. `least` is the smallest
   * top of the scale. */
  constructor(title, series, write, least = 0) {
    this.least = least;
    this.series = series;
    this.write = write;
    this.text = (value) => write(value).join(" ");
    this.width = 320;
    this.grid = [1, 0.5].map((share) => [share, draw("line", { class: "grid" })]);
    this.base = draw("line", { class: "base" });
    this.limit = draw("line", { class: "limit" });
    this.scale = draw("text", { class: "label" });
    this.ticks = [0.5, 0].map((share) => [share, draw("text", { class: "label", "text-anchor": "end" })]);
    this.limitText = draw("text", { class: "label", "text-anchor": "end" });
    this.times = ["start", "middle", "end"].map((anchor) => draw("text", { class: "label", "text-anchor": anchor }));
    this.cursor = draw("line", { class: "cursor" });
    this.area = draw("path", { class: `area ${series[0].line}` });
    this.lines = series.map(({ line }) => draw("path", { class: `line ${line}` }));
    this.dots = series.map(({ line }) => draw("circle", { class: `dot ${line}`, r: 3.5 }));
    this.svg = draw(
      "svg", { role: "img", height: HEIGHT },
      ...this.grid.map(([, line]) => line), this.area, this.limit, this.base, this.cursor, ...this.lines, ...this.dots,
      this.scale, ...this.ticks.map(([, tick]) => tick), this.limitText, ...this.times,
    );
    this.body = make("tbody");
    const heads = ["Time", ...series.map((each) => each.label)];
    this.caption = make("caption", { class: "hidden" });
    this.tableOf = make("span", { class: "hidden" });
    this.call(title);
    this.table = make(
      "table", {},
      this.caption,
      make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
      this.body,
    );
    const summary = make("summary", {}, "Table", this.tableOf);
    this.details = make("details", {}, summary, make("div", { class: "scroll" }, this.table));
    this.details.addEventListener("toggle", () => this.last && this.#tabulate(this.last));
    this.element = make("div", { class: "chart" }, this.svg, this.details);
  }

  /** Call it by another name. */
  call(title) {
    this.title = title;
    say(this.caption, `${title} over the time shown`);
    say(this.tableOf, ` of ${title}`);
  }

  /** Draw `values`, a list for each series with null where nothing is known. `bins` are the stretches of time, `chosen` the
   * index of the one looked at or null, `limit` a line of its own or null. */
  draw({ bins, values, span, end, chosen, limit }) {
    this.last = { bins, values, span, end };
    const known = values.flat().filter((value) => value !== null && Number.isFinite(value));
    const highest = Math.max(this.least, ...known);
    const top = ceiling(limit && limit <= 2 * highest ? Math.max(limit, highest) : highest);
    const x = (index) => this.#across((index + 0.5) / bins.length);
    const y = (value) => HEIGHT - BOTTOM - (Math.min(value, top) / top) * (HEIGHT - BOTTOM - TOP);
    this.#frame(top, y, limit && limit <= top ? limit : null, span, end);
    values.forEach((series, index) => mark(this.lines[index], "d", path(series, x, y)));
    mark(this.area, "d", area(values[0], x, y));
    this.#look(values, chosen, x, y);
    this.#describe(known, span, values);
    if (this.details.open) this.#tabulate(this.last);
  }

  /** Return the share of the time shown that lies left of `clientX`, at least 0 and below 1. */
  shareAt(clientX) {
    const share = (clientX - this.svg.getBoundingClientRect().left - LEFT) / (this.width - LEFT);
    return Math.min(0.9999, Math.max(0, share));
  }

  #across(share) {
    return LEFT + share * (this.width - LEFT);
  }

  #frame(top, y, limit, span, end) {
    mark(this.svg, "viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const grid = this.grid.map(([share, line]) => [line, y(share * top)]);
    for (const [line, at] of [...grid, [this.base, y(0)], [this.limit, limit === null ? -9 : y(limit)]]) {
      for (const [name, value] of Object.entries({ x1: LEFT, x2: this.width, y1: at, y2: at })) mark(line, name, value);
    }
    place(this.scale, 0, y(top) - 5, this.text(top));
    for (const [share, tick] of this.ticks) place(tick, LEFT - 5, y(share * top) + 4, share ? this.#tick(share * top, top) : "0");
    place(this.limitText, this.width, limit === null ? -9 : y(limit) - 5, limit === null ? "" : `limit ${this.text(limit)}`);
    this.times.forEach((text, index) => place(text, this.#across(index / 2), HEIGHT - 4, end ? clock(end - span * (1 - index / 2)) : ""));
  }

  /** Write a value of the scale; its unit only where it is another one than that of the top. */
  #tick(value, top) {
    const [written, unit] = this.write(value);
    return unit.startsWith(this.write(top)[1]) ? written : `${written} ${unit}`;
  }

  #look(values, chosen, x, y) {
    const at = chosen === null ? -9 : x(chosen);
    for (const [name, value] of Object.entries({ x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM })) mark(this.cursor, name, value);
    values.forEach((series, index) => {
      const value = chosen === null ? null : series[chosen];
      mark(this.dots[index], "cx", value === null ? -9 : at);
      mark(this.dots[index], "cy", value === null ? -9 : y(value));
    });
  }

  #describe(known, span, values) {
    const texts = this.series.map(({ label }, index) => {
      const there = values[index].filter((value) => value !== null);
      return there.length
        ? `${label}: last ${this.text(there.at(-1))}, lowest ${this.text(Math.min(...there))}, highest ${this.text(Math.max(...there))}`
        : `${label}: nothing yet`;
    });
    mark(this.svg, "aria-label", `${this.title}, last ${span / 60} min. ${texts.join("; ")}.`);
  }

  /** Show every so many points as rows, the newest first; each is what was then, not a mean. */
  #tabulate({ bins, values }) {
    const step = Math.max(1, Math.floor(bins.length / ROWS));
    const rows = [];
    for (let index = bins.length - 1; index >= 0 && rows.length < ROWS; index -= step) {
      if (bins[index] === null) continue;
      const cells = values.map((series) => make("td", {}, series[index] === null ? "–" : this.text(series[index])));
      rows.push(make("tr", {}, make("th", { scope: "row" }, clock(bins[index].at)), ...cells));
    }
    this.body.replaceChildren(...rows);
  }
}

/** A round number that is at least `value`: 1, 2, 2.5 or 5 times a power of ten. */
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((round) => round >= value * 0.9999) ?? 10 * power;
}

function path(series, x, y) {
  let drawn = "";
  let pen = "M";
  series.forEach((value, index) => {
    if (value === null) pen = "M";
    else {
      drawn += `${pen}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
      if (pen === "M") drawn += "h0.01"; // a point of its own shows as a dot
      pen = "L";
    }
  });
  return drawn;
}

function area(series, x, y) {
  let drawn = "";
  let start = null;
  series.forEach((value, index) => {
    if (value === null) return;
    if (start === null) {
      start = index;
      drawn += `M${x(index).toFixed(1)} ${y(0).toFixed(1)}`;
    }
    drawn += `L${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
    if (index + 1 === series.length || series[index + 1] === null) {
      drawn += `L${x(index).toFixed(1)} ${y(0).toFixed(1)}Z`;
      start = null;
    }
  });
  return drawn;
}

function place(text, x, y, content) {
  mark(text, "x", x);
  mark(text, "y", y);
  say(text, content);
}
