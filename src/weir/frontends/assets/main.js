// Puts the page together: what the server tells goes into a history, and what is chosen of it is shown.

import { Cards } from "./cards.js";
import { Feed } from "./feed.js";
import { ROWS, TEXTS, ago, clock } from "./format.js";
import { History } from "./history.js";
import { Clients, Demand, Devices, Frontends, Fronts, Ends, Jobs, Models, Workers, countsOf } from "./lists.js";
import { Shares } from "./shares.js";
import { byId, make, mark, say } from "./elements.js";
import { isSingle } from "./sums.js";
import { followTheme } from "./theme.js";
import { verdict } from "./verdict.js";

const PROCESSES = 4; // whose histories are kept, where several answer at one address

const histories = new Map(); // by life of the process
const chosen = { model: "", span: 300, at: null, hovered: null };
let latest = null; // the last answer
let silent = false; // whether the server does not answer

const cards = new Cards(byId("cards"));
const shares = new Shares(byId("shares"));
const models = new Models(byId("models"), choose);
const devices = new Devices(byId("devices-part"), byId("devices"));
const demand = new Demand(byId("demand-part"), byId("demand"));
const jobs = new Jobs(byId("jobs-part"), byId("jobs"));
const workers = new Workers(byId("workers"));
const fronts = new Fronts(byId("fronts-part"), byId("fronts"));
const ends = new Ends(byId("ends"));
const frontends = new Frontends(byId("frontends"));
const clients = new Clients(byId("clients-part"), byId("clients"));
const feed = new Feed(take, fail);

function take(answer) {
  const fresh = !histories.has(answer.life);
  if (fresh) histories.set(answer.life, new History());
  else if (latest.life !== answer.life) byId("several").hidden = false;
  for (const life of histories.keys()) if (histories.size > PROCESSES && life !== answer.life) histories.delete(life);
  histories.get(answer.life).take(answer.samples);
  latest = answer;
  silent = false;
  if (!answer.more) show();
}

function fail() {
  silent = true;
  show();
}

function show() {
  if (!latest) return say(byId("verdict"), silent ? "The server does not answer; trying again" : "Connecting …");
  const history = histories.get(latest.life);
  const bounds = latest.server.buckets;
  const known = latest.now?.models ?? {};
  offer(Object.keys(known).filter(Boolean));
  const bins = history.bins(chosen.span, chosen.model);
  const index = point(bins);
  const recent = history.recent(chosen.model);
  const all = history.all(chosen.span, chosen.model);
  const counts = countsOf(known, chosen.model);
  const reading = shownOf(known);
  const words = reading.length && reading.every(([, { texts }]) => texts) ? TEXTS : ROWS;
  const view = {
    words,
    bins, bounds, span: chosen.span, end: history.now, chosen: index, shown: index === null ? recent : bins[index],
    most: most(known), padded: counts.tokens !== undefined || reading.some(([, { settings }]) => settings?.padded),
    bulk: Boolean(counts.bulk) || reading.some(([, { levels }]) => levels?.waiting_bulk), single: isSingle(all, recent),
  };
  cards.show(view);
  shares.show(all, bounds, words);
  models.show(known, chosen.model, bounds, words);
  devices.show(known);
  demand.show(known, latest.now?.on_demand);
  jobs.show(latest.now?.jobs, latest.now?.at ?? 0);
  workers.show(known, chosen.model, latest.now?.at ?? 0);
  fronts.show(latest.now?.fronts ?? [], latest.now?.at ?? 0);
  ends.show(counts, recent, all);
  frontends.show(counts, recent, words);
  clients.show(latest.now?.clients ?? []);
  tell(history, known, bins, index);
  return undefined;
}

/** Say how things stand, in words. */
function tell(history, known, bins, index) {
  const [text, mood] = silent ? ["The server does not answer; trying again", "bad"] : verdict(known, history.recent(""));
  say(byId("verdict"), feed.paused ? "Paused" : text);
  mark(byId("verdict"), "data-mood", feed.paused ? "warn" : mood);
  const now = history.now || (latest.now?.at ?? 0);
  const at = index === null ? now : timeOf(bins, index, now);
  const when = index === null ? (feed.paused || silent ? "as of" : "now") : ago(history.now - at);
  say(byId("moment-text"), at ? `${when} ${clock(at)}` : "");
  const slider = byId("moment");
  slider.max = bins.length - 1;
  slider.value = index ?? bins.length - 1;
  mark(slider, "aria-valuetext", index === null ? "now" : `${ago(history.now - at)}, ${clock(at)}`);
  for (const element of document.querySelectorAll(".span-text")) say(element, `in the last ${chosen.span / 60} min`);
  byId("uncounted").hidden = latest.server.counted;
  mark(document.body, "data-uncounted", latest.server.counted ? null : "");
  say(byId("version"), latest.server.version);
}

const shownOf = (known) => Object.entries(known).filter(([label]) => label && (!chosen.model || label === chosen.model));

/** The limits of the model shown; of several there are none to compare with. */
function most(known) {
  const shown = shownOf(known);
  return shown.length === 1 ? (shown[0][1].settings ?? {}) : {};
}

const timeOf = (bins, index, now) => bins[index]?.at ?? now - (bins.length - 1 - index) * (chosen.span / bins.length);

/** The index of the point looked at; null for now. */
function point(bins) {
  if (chosen.hovered !== null) return Math.min(bins.length - 1, Math.floor(chosen.hovered * bins.length));
  if (chosen.at === null) return null;
  const now = histories.get(latest.life).now;
  const back = Math.round((now - chosen.at) / (chosen.span / bins.length));
  return Math.max(0, bins.length - 1 - back);
}

function choose(model) {
  chosen.model = model;
  byId("model").value = model;
  show();
}

/** Keep the models to choose from those that there are. */
function offer(labels) {
  const select = byId("model");
  const there = [...select.options].slice(1).map((option) => option.value);
  if (there.join("\n") === labels.join("\n")) return;
  select.replaceChildren(select.options[0], ...labels.map((label) => make("option", { value: label }, label)));
  if (!labels.includes(chosen.model)) chosen.model = "";
  select.value = chosen.model;
}

function listen() {
  byId("model").addEventListener("change", (event) => choose(event.target.value));
  byId("span").addEventListener("change", (event) => {
    chosen.span = Number(event.target.value);
    show();
  });
  byId("moment").addEventListener("input", ({ target }) => {
    const back = Number(target.max) - Number(target.value);
    const now = latest ? histories.get(latest.life).now : 0;
    chosen.at = back && latest ? now - back * (chosen.span / (Number(target.max) + 1)) : null;
    show();
  });
  byId("pause").addEventListener("click", ({ currentTarget }) => {
    feed.pause(!feed.paused);
    mark(currentTarget, "aria-pressed", feed.paused);
    say(currentTarget, feed.paused ? "Resume" : "Pause");
    show();
  });
  document.querySelector(".controls").addEventListener("submit", (event) => event.preventDefault());
  for (const chart of cards.charts) {
    chart.svg.addEventListener("pointermove", (event) => {
      chosen.hovered = chart.shareAt(event.clientX);
      show();
    });
    chart.svg.addEventListener("pointerleave", () => {
      chosen.hovered = null;
      show();
    });
  }
}

function measure() {
  const sizes = new ResizeObserver(() => {
    for (const chart of cards.charts) chart.width = chart.element.clientWidth || chart.width;
    show();
  });
  for (const chart of cards.charts) sizes.observe(chart.element);
}

followTheme(byId("theme"));
listen();
measure();
feed.start();
