// Explains the policy of one model, which the address names after #, in words and tables.

import { exact, number, timeText } from "./format.js";
import { byId, make, say } from "./elements.js";

const SIZES = 8; // rows of a table
const EVERY = 5000; // milliseconds between two looks

const known = (value) => value !== null && value !== undefined;
const ms = (value) => (known(value) ? timeText(value / 1000) : "–");
const some = (list) => list.filter((_, index) => index % Math.max(1, Math.ceil(list.length / SIZES)) === 0 || index === list.length - 1);

/** What the policy does now, as sentences. */
function sentences({ policy, rate, table, solved, learning, workers, max_waiting: most, drift, scaling }) {
  const found = [`The policy ${policy} decides for ${exact(workers)} ${workers === 1 ? "worker" : "workers"} when a batch is dispatched.`];
  if (known(table?.limit)) {
    found.push(`Now it dispatches once ${exact(table.limit)} ${table.limit === 1 ? "row waits" : "rows wait"}, as ${number(rate)} rows arrive per second.`);
  } else if (learning) {
    found.push("It has no table yet: it learns how long batches take, and dispatches all that waits whenever a worker is free.");
  } else if (!solved) found.push("It follows a fixed rule; nothing was solved.");
  if (known(most)) found.push(`At most ${exact(most)} rows may wait; more are refused.`);
  if (drift && Math.abs(drift.factor - 1) > 0.1) found.push(`Batches take ${number(drift.factor)} times as long as it was solved for.`);
  if (solved?.error) found.push(`The last attempt to solve it failed: ${solved.error}`);
  else if (solved?.solving) found.push("It is being solved in the background.");
  if (scaling?.because) found.push(`So many workers because: ${scaling.because}.`);
  return found;
}

function tableOf(title, heads, rows) {
  if (!rows.length) return [];
  const head = make("tr", {}, ...heads.map((text, index) => make("th", { scope: "col", class: index ? "number" : null }, text)));
  const body = rows.map(([first, ...others]) =>
    make("tr", {}, make("th", { scope: "row" }, first), ...others.map((text) => make("td", { class: "number" }, text))));
  const table = make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
  return [make("section", {}, make("h2", {}, title), make("div", {}, make("div", { class: "scroll" }, table)))];
}

function compared({ predicted = {}, measured = {}, objective }) {
  const rows = [
    ["mean response", ms(predicted.response_time_ms), ms(measured.response_time_ms)],
    ["p99", ms(predicted.p99_ms), ms(measured.p99_ms)],
    ["power, W", number(predicted.power_w), number(measured.power_w)],
    ["weighted cost", number(predicted.cost), number(measured.cost)],
  ].filter(([, ...values]) => values.some((text) => text !== "–"));
  const title = known(objective) ? `Predicted and measured; the objective is ${JSON.stringify(objective)}` : "Predicted and measured";
  return tableOf(title, ["", "predicted", "measured"], rows);
}

function show(report) {
  const { solved, profile } = report;
  const limits = (solved?.limits ?? []).map((limit, index) => [`${number(solved.rates?.[index])} rows/s`, exact(limit)]);
  const times = (profile?.service_time_ms ?? []).map((time, index) => [exact(index + 1), ms(time)]);
  const powers = times.filter((_, index) => Number.isInteger(Math.log2(index + 1)) || index + 1 === times.length);
  byId("told").replaceChildren(
    ...sentences(report).map((text) => make("p", {}, text)),
    ...compared(report),
    ...tableOf("Rows that must wait before a batch is dispatched", ["if so many arrive", "rows"], some(limits)),
    ...tableOf("How long a batch takes", ["rows", "time"], powers),
  );
}

async function look() {
  const name = decodeURIComponent(location.hash.slice(1));
  const address = `../models/${name.split("/").map(encodeURIComponent).join("/")}/policy`;
  say(byId("name"), name);
  byId("json").href = address;
  try {
    const response = await fetch(address);
    const report = await response.json();
    if (response.ok) show(report);
    else byId("told").replaceChildren(make("p", { class: "note" }, report.error?.message ?? response.statusText));
  } catch (error) {
    byId("told").replaceChildren(make("p", { class: "note" }, `The server does not answer: ${error.message}`));
  }
}

addEventListener("hashchange", look);
setInterval(look, EVERY);
look();
