// The cards: one quantity each, its number first and then how it went.

import { Chart } from "./chart.js";
import { ROWS, bytes, number, percent, time, timeText } from "./format.js";
import { make, mark, say } from "./elements.js";
import { ends, endsWith, mean, quantile, size, total } from "./sums.js";

const rate = (value, stretch) => value / stretch.seconds;
const joined = (parts) => parts.filter(Boolean).join(" · ");

/** What the cards show. `of` reads a number from a stretch of time; `counted`: only if the server counts; `there`: only if.
 * A card is hidden until it has shown something other than 0, unless it is `always` there. A series that is `rare` is hidden while it is 0. */
const CARDS = [
  {
    id: "requests", title: "Requests", unit: "/s", counted: true, always: true, titled: ({ words }) => words.requests,
    series: [
      { label: "answered", line: "a", of: (stretch) => rate(ends(stretch.counts)[0], stretch) },
      { label: "failed", line: "b", rare: true, of: (stretch) => rate(ends(stretch.counts)[1], stretch) },
    ],
    note: ({ counts }) => {
      const [good, bad] = ends(counts);
      if (!bad) return good ? "all answered" : "no requests";
      const refused = endsWith(counts, "Overloaded");
      return joined([`${percent(bad / (good + bad))} failed`, refused && `${percent(refused / (good + bad))} refused: queue full`]);
    },
  },
  {
    id: "rows", title: "Rows", unit: "/s", counted: true, there: ({ words, single }) => words === ROWS && !single, titled: ({ words }) => words.dispatched,
    series: [{ label: "dispatched", line: "a", of: (stretch) => rate(total(stretch.counts.rows), stretch) }],
    note: (stretch) => joined([
      stretch.counts.tokens && `${number(rate(stretch.counts.tokens, stretch))} tokens/s`,
      stretch.counts.parts && `${number(rate(stretch.counts.parts, stretch))} streamed parts/s`,
      `${number(stretch.levels.running)} in workers`,
    ]),
  },
  {
    id: "classes", title: "Classes of work", unit: "rows/s", counted: true, there: ({ bulk }) => bulk,
    series: [
      { label: "interactive", line: "a", of: ({ counts, seconds }) => (total(counts.rows) - (counts.bulk ?? 0)) / seconds },
      { label: "bulk", line: "b", of: ({ counts, seconds }) => (counts.bulk ?? 0) / seconds },
    ],
    note: ({ levels }) => {
      const bulk = levels.waiting_bulk ?? 0;
      return `waiting: ${number((levels.waiting ?? 0) - bulk)} interactive · ${number(bulk)} bulk`;
    },
  },
  {
    id: "time", title: "Response time", time: true, counted: true,
    series: [
      { label: "p50", line: "a", of: ({ counts }, { seconds }) => quantile(0.5, counts.total, seconds) },
      { label: "p99", line: "b", of: ({ counts }, { seconds }) => quantile(0.99, counts.total, seconds) },
    ],
    note: ({ counts }) => (size(counts.total) ? `mean ${timeText(mean(counts.total))}, arrival to response` : "no responses"),
  },
  {
    id: "queue", title: "Queue time", time: true, counted: true,
    series: [
      { label: "p50", line: "a", of: ({ counts }, { seconds }) => quantile(0.5, counts.queue, seconds) },
      { label: "p99", line: "b", of: ({ counts }, { seconds }) => quantile(0.99, counts.queue, seconds) },
    ],
    note: ({ counts }) => (size(counts.queue) ? `mean ${timeText(mean(counts.queue))}, arrival to batch` : "nothing dispatched"),
  },
  {
    id: "waiting", title: "Queue depth", unit: "rows",
    series: [{ label: "waiting", line: "a", of: ({ levels }) => levels.waiting }],
    limit: ({ most }) => most.max_queue_size,
    note: ({ levels }, { most }) => joined([
      levels.waiting ? `oldest ${timeText(levels.oldest)}` : "empty", most.max_queue_size && `room for ${number(most.max_queue_size)}`,
    ]),
  },
  {
    id: "batch", title: "Batch size", unit: "rows", counted: true,
    series: [{ label: "mean", line: "a", of: ({ counts }) => mean(counts.rows) }],
    limit: ({ most }) => most.max_batch_size,
    note: (stretch, { most }) => joined([
      `${number(rate(size(stretch.counts.rows), stretch))} batches/s`, most.max_batch_size && `at most ${number(most.max_batch_size)}`,
    ]),
  },
  {
    id: "padding", title: "Padding", unit: "%", counted: true, there: ({ padded }) => padded,
    series: [{ label: "waste", line: "a", of: ({ counts }) => waste(counts) }],
    note: ({ counts }) => (counts.tokens ? "of the compute time" : "nothing computed"),
  },
  {
    id: "processor", title: "Processor", unit: "%", always: true, least: 100, // an idle one is drawn as idle
    series: [
      { label: "server", line: "a", of: ({ newest }) => 100 * (newest.machine.cpu / newest.seconds) },
      { label: "workers", line: "b", of: ({ newest }) => ofOneCore(newest.machine.workers_cpu, newest.seconds) },
    ],
    note: ({ late }) => joined(["of one core", `event loop ${timeText(late)} late`]),
  },
  {
    id: "memory", title: "Memory", bytes: true,
    series: [
      { label: "server", line: "a", of: ({ machine }) => machine.memory_bytes },
      { label: "workers", line: "b", of: ({ machine }) => machine.workers_memory_bytes },
    ],
    note: () => "resident; shared pages count in each",
  },
];

/** Processor time as a share of `seconds` of one core, in percent; null if it is unknown, as that of other machines' workers is. */
function ofOneCore(used, seconds) {
  return used == null ? null : (100 * used) / seconds;
}

/** The share of padding in what was computed, both counted as tokens that take as long, in percent. */
function waste({ tokens, padding }) {
  return tokens || padding ? (100 * (padding ?? 0)) / ((tokens ?? 0) + (padding ?? 0)) : null;
}

function written(card, value, words = ROWS) {
  if (card.time) return time(value);
  if (card.bytes) return bytes(value);
  return [number(value), card.unit === "rows" ? words[value === 1 ? "row" : "rows"] : card.unit];
}

/** All cards, in a grid. */
export class Cards {
  constructor(parent) {
    this.parent = parent;
    this.cards = CARDS.map((card) => new Card(card));
    parent.append(...this.cards.map(({ element }) => element));
  }

  get charts() {
    return this.cards.map(({ chart }) => chart);
  }

  /** Show the stretches `bins`, and in numbers the stretch `shown`. */
  show(view) {
    for (const card of this.cards) card.show(view);
    mark(this.parent, "data-cards", this.cards.filter(({ element }) => element.checkVisibility()).length);
  }
}

class Card {
  constructor(card) {
    this.card = card;
    this.words = ROWS;
    this.chart = new Chart(card.title, card.series, (value) => written(card, value, this.words), card.least);
    this.numbers = card.series.map(({ label, line }) => {
      const value = make("span", { class: "value", "data-series": label });
      const unit = make("span", { class: "unit" });
      const name = make("span", { class: `key ${line}` }, label);
      return { value, unit, element: make("p", { class: "number-line" }, name, " ", value, " ", unit) };
    });
    this.note = make("p", { class: "quiet note-line" });
    const title = `${card.id}-title`;
    this.title = make("h3", { id: title }, card.title);
    this.element = make(
      "section", { class: card.counted ? "card counted" : "card", id: card.id, "aria-labelledby": title },
      this.title, make("div", { class: "numbers" }, ...this.numbers.map(({ element }) => element)),
      this.note, this.chart.element,
    );
  }

  show(view) {
    const { card } = this;
    this.words = view.words;
    if (card.titled) {
      say(this.title, card.titled(view));
      this.chart.call(card.titled(view));
    }
    const { bins, shown, span, end, chosen } = view;
    card.series.forEach(({ of }, index) => {
      const [value, unit] = written(card, shown ? of(shown, view.bounds) : null, view.words);
      say(this.numbers[index].value, value);
      say(this.numbers[index].unit, unit);
    });
    say(this.note, shown ? card.note(shown, view) : "");
    const values = card.series.map(({ of }) => bins.map((bin) => (bin ? of(bin, view.bounds) : null)));
    this.told ||= card.always || values.flat().some(Boolean);
    mark(this.element, "data-absent", this.told && (!card.there || card.there(view)) ? null : "");
    card.series.forEach(({ rare, of }, index) => {
      const hidden = rare && !values[index].some(Boolean) && !(shown && of(shown, view.bounds));
      mark(this.numbers[index].element, "data-absent", hidden ? "" : null);
      if (hidden) values[index].fill(null);
    });
    this.chart.draw({ bins, values, span, end, chosen, limit: card.limit?.(view) ?? null });
  }
}
