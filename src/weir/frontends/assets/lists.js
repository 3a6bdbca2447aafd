// The tables: models, shared devices, models on demand, batch jobs, workers, fronts, answers and errors, frontends, clients.

import { byId, say } from "./elements.js";
import { agoText, bytesText, exact, number, percent, timeText } from "./format.js";
import { Table } from "./tables.js";
import { answered, ends, mean, ofModel, quantile, size, total } from "./sums.js";

const NUMBERS = (heads) => heads.map((head) => ({ head, number: true }));
const NO_MODEL = "(no such model)";

export class Models {
  constructor(parent, choose) {
    this.choose = choose;
    this.table = new Table("Models since the start", [
      { head: "Model" }, { head: "State" },
      ...NUMBERS(["Requests", "Failed", "Rows", "Batches", "Mean batch", "p50", "p99", "Waiting", "In workers", "Workers"]),
      { head: "Why so many workers" },
    ]);
    parent.append(this.table.element);
  }

  show(models, chosen, bounds, words) {
    this.table.call(2, words.requests);
    this.table.call(4, words.dispatched);
    const rows = Object.entries(models).map(([label, { ready, reason, counts = {}, levels = {}, workers = [], scaling }]) => {
      const [good, bad, left] = ends(counts);
      const name = label
        ? { text: label, press: () => this.choose(label === chosen ? "" : label), pressed: label === chosen }
        : NO_MODEL;
      const state = ready === undefined ? { text: "–" } : { text: ready ? "ready" : reason, mood: ready ? null : "warn" };
      return {
        key: label,
        cells: [
          name, state, exact(good + bad + left), { text: exact(bad), mood: bad ? "warn" : null }, exact(total(counts.rows)),
          exact(size(counts.rows)), number(mean(counts.rows)), timeText(quantile(0.5, counts.total, bounds.seconds)),
          timeText(quantile(0.99, counts.total, bounds.seconds)), exact(levels.waiting), exact(levels.running),
          ready === undefined ? "–" : enough(workers, scaling), scaling?.because ?? "–",
        ],
      };
    });
    this.table.show(rows, "no models");
  }
}

/** How many workers are ready, of how many: of 2, or of 1..16 if the load decides. */
function enough(workers, scaling) {
  workers = workers.filter(({ bulk }) => !bulk);
  return `${workers.filter(({ state }) => state === "ready").length} of ${scaling?.allowed ?? workers.length}`;
}

// Why a model had its last turn on a device, in the words of the page.
const TURNS = {
  free: "the device was free", alone: "no other model had requests", due: "its requests had to begin",
  first: "the order puts it first", others_wait: "the models before it wait for more requests",
};

export class Devices {
  constructor(part, parent) {
    this.part = part;
    this.table = new Table("Shared devices", [
      { head: "Device" }, { head: "Model" }, { head: "Order" }, { head: "Share of the time used" },
      ...NUMBERS(["Time", "Turns", "Waiting"]), { head: "Why it was next" },
    ]);
    parent.append(this.table.element);
  }

  /** Show what the models that take turns have had of their devices; nothing if none does. */
  show(models) {
    const sharing = Object.entries(models).filter(([, { device }]) => device);
    sharing.sort(([, one], [, other]) => (one.device.group < other.device.group ? -1 : Number(one.device.group > other.device.group)));
    this.part.hidden = !sharing.length;
    this.table.show(sharing.map(([label, { device, levels }]) => ({
      key: label,
      cells: [
        device.group, label, device.order, { share: device.share }, timeText(device.busy_seconds),
        exact(Object.values(device.turns).reduce((sum, count) => sum + count, 0)), exact(levels.waiting), TURNS[device.because] ?? "–",
      ],
    })), "none");
  }
}

const DEMAND_MOODS = { failed: "warn" };

export class Demand {
  constructor(part, parent) {
    this.part = part;
    this.table = new Table("Models on demand", [
      { head: "Model" }, { head: "State" }, ...NUMBERS(["Memory", "GPU memory", "Time to load", "Rows a second"]), { head: "Why" },
    ]);
    parent.append(this.table.element);
  }

  /** Show which models on demand are in memory, the largest first, then the others, and what they take of what there is. */
  show(models, memory) {
    this.part.hidden = !memory;
    if (!memory) return;
    const known = Object.entries(models).filter(([, { residency }]) => residency);
    const loaded = known.filter(([, { residency }]) => residency.state === "loaded");
    const taken = (kind, name) => {
      const [used, limit] = [memory[`${kind}_bytes`], memory[`${kind}_limit`]];
      return used || limit ? [`${bytesText(used)}${limit ? ` of ${bytesText(limit)}` : ""}${name}`] : [];
    };
    say(byId("demand-memory"), [
      `${exact(loaded.length)} of ${exact(memory.models)} loaded`, ...taken("memory", ""), ...taken("gpu_memory", " on GPUs"),
      "measured, or stated if that is more",
    ].join(" · "));
    const others = known.filter(([, { residency }]) => residency.state !== "loaded");
    loaded.sort(([, one], [, other]) => other.residency.memory_bytes - one.residency.memory_bytes);
    this.table.show([...loaded, ...others].map(([label, { residency }]) => {
      const { state, reason, pinned, rate } = residency;
      const here = state === "loaded";
      return {
        key: label,
        cells: [
          label, { text: state, mood: DEMAND_MOODS[state] ?? null }, here ? bytesText(residency.memory_bytes) : "–",
          here ? bytesText(residency.gpu_memory_bytes) : "–", timeText(residency.load_seconds), number(rate), reason || (pinned ? "stays" : "–"),
        ],
      };
    }), "none was called yet");
  }
}

// The states of a job, in the words of the page.
const WAITING = ["validating"];
const RUNNING = ["in_progress", "finalizing", "cancelling"];
const JOB_MOODS = { failed: "warn", expired: "warn" };

export class Jobs {
  constructor(part, parent) {
    this.part = part;
    this.table = new Table("Batch jobs", [
      { head: "Job" }, { head: "Endpoint" }, { head: "State" }, { head: "Progress" }, ...NUMBERS(["Done", "Of", "Failed", "Created"]),
    ]);
    parent.append(this.table.element);
  }

  /** Show what the server says of its batch jobs at the instant `at`; nothing if it keeps none. */
  show(overview, at) {
    this.part.hidden = !overview;
    if (!overview) return;
    const { counts, jobs } = overview;
    const sum = (...states) => states.reduce((count, state) => count + (counts[state] ?? 0), 0);
    const cancelled = sum("cancelled");
    say(byId("jobs-counts"), [
      `${exact(sum(...RUNNING))} running`, `${exact(sum(...WAITING))} waiting`, `${exact(sum("completed"))} done`,
      `${exact(sum("failed", "expired"))} failed`, ...(cancelled ? [`${exact(cancelled)} cancelled`] : []),
    ].join(" · "));
    this.table.show(jobs.map(({ id, endpoint, status, total, completed, failed, created_at: created }) => ({
      key: id,
      cells: [
        id, endpoint, { text: status.replace("_", " "), mood: JOB_MOODS[status] ?? null }, { share: total ? (completed + failed) / total : 0 },
        exact(completed + failed), exact(total), { text: exact(failed), mood: failed ? "warn" : null }, agoText(at - created),
      ],
    })), "no jobs");
  }
}

/** The share of one core that each process used since the last look. */
class Processors {
  constructor() {
    this.before = new Map(); // [processor time, instant, share] by process
    this.seen = new Map();
  }

  /** The share of a process, which tells its `pid` and the processor time `cpu` at the instant `at`; null if it is unknown. */
  share({ pid, cpu }, at) {
    if (cpu === undefined) return null;
    const [earlier, since, share] = this.before.get(pid) ?? [cpu, at, null];
    const now = at > since ? Math.max(0, (cpu - earlier) / (at - since)) : share;
    this.seen.set(pid, at > since ? [cpu, at, now] : [earlier, since, share]);
    return now;
  }

  /** Forget the processes that were not asked for since the last call. */
  turn() {
    this.before = this.seen;
    this.seen = new Map();
  }
}

export class Fronts {
  constructor(part, parent) {
    this.part = part;
    this.processors = new Processors();
    this.table = new Table("Fronts now", NUMBERS(["Front", "Connections", "Requests", "Restarts", "Memory", "Processor", "Process"]));
    parent.append(this.table.element);
  }

  /** Show a row for each front at the instant `at`; nothing if the server itself listens. */
  show(fronts, at) {
    this.part.hidden = !fronts.length;
    this.table.show(fronts.map((front) => ({
      key: exact(front.number),
      cells: [
        exact(front.number), exact(front.connections), exact(front.requests),
        { text: exact(front.starts - 1), mood: front.starts > 1 ? "warn" : null }, bytesText(front.memory_bytes),
        percent(this.processors.share(front, at)), String(front.pid),
      ],
    })), "no fronts");
    this.processors.turn();
  }
}

export class Workers {
  constructor(parent) {
    this.processors = new Processors();
    this.table = new Table("Workers now", [
      { head: "Model" }, { head: "Worker", number: true }, { head: "State" },
      ...NUMBERS(["Batches held", "Restarts", "Memory", "Processor", "Process"]), { head: "Node" }, { head: "GPUs" }, { head: "Actor" }, { head: "Why" },
    ]);
    parent.append(this.table.element);
  }

  show(models, chosen, at) {
    const rows = [];
    for (const [label, { workers = [] }] of Object.entries(models)) {
      if (chosen && label !== chosen) continue;
      for (const worker of workers) {
        const cells = [
          label, worker.bulk ? `bulk ${worker.index}` : worker.kind ? `${worker.index} ${worker.kind}` : exact(worker.index), { text: worker.state, mood: worker.state === "ready" ? null : "warn" }, exact(worker.in_flight),
          { text: exact(worker.restarts), mood: worker.restarts ? "warn" : null }, bytesText(worker.memory_bytes),
          percent(this.processors.share(worker, at)), worker.pid === null ? "–" : String(worker.pid),
          worker.node ? `${worker.address} ${worker.node.slice(0, 8)}` : "–", (worker.gpus ?? []).join(" ") || "–", worker.actor || "–",
          worker.reason || "–",
        ];
        rows.push({ key: `${label} ${worker.index}`, cells });
      }
    }
    this.processors.turn();
    this.table.show(rows, "no workers");
  }
}

export class Ends {
  constructor(parent) {
    this.table = new Table("Responses and errors", [
      { head: "Status" }, { head: "Frontend" }, ...NUMBERS(["Per second", "In the time shown", "Since the start"]),
    ]);
    parent.append(this.table.element);
  }

  show(counts, recent, all) {
    const rows = Object.entries(counts.ends ?? {}).flatMap(([frontend, codes]) =>
      Object.entries(codes).map(([code, count]) => ({ frontend, code, count })),
    );
    rows.sort((a, b) => answered(b.code) - answered(a.code) || (a.code < b.code ? -1 : 1) || (a.frontend < b.frontend ? -1 : 1));
    const of = (stretch, frontend, code) => stretch?.counts.ends?.[frontend]?.[code] ?? 0;
    this.table.show(rows.map(({ frontend, code, count }) => ({
      key: `${frontend} ${code}`,
      cells: [
        { text: code, mood: answered(code) ? null : "warn" }, frontend, number(of(recent, frontend, code) / (recent?.seconds ?? 1)),
        exact(of(all, frontend, code)), exact(count),
      ],
    })), "nothing yet");
  }
}

export class Frontends {
  constructor(parent) {
    this.table = new Table("Frontends", [
      { head: "Frontend" }, ...NUMBERS(["Requests/s", "Requests", "Failed", "Received/s", "Received", "Sent/s", "Sent"]),
    ]);
    parent.append(this.table.element);
  }

  show(counts, recent, words) {
    this.table.call(1, `${words.requests}/s`);
    this.table.call(2, words.requests);
    const names = [...new Set([...Object.keys(counts.ends ?? {}), ...Object.keys(counts.bytes ?? {})])].sort();
    const seconds = recent?.seconds ?? 1;
    this.table.show(names.map((frontend) => {
      const here = (of) => ends({ ends: { frontend: of?.ends?.[frontend] ?? {} } });
      const [good, bad, left] = here(counts);
      const [received, sent] = counts.bytes?.[frontend] ?? [0, 0];
      const [receivedNow, sentNow] = recent?.counts.bytes?.[frontend] ?? [0, 0];
      const now = here(recent?.counts).reduce((a, b) => a + b, 0);
      return {
        key: frontend,
        cells: [
          frontend, number(now / seconds), exact(good + bad + left), exact(bad), bytesText(receivedNow / seconds), bytesText(received),
          bytesText(sentNow / seconds), bytesText(sent),
        ],
      };
    }), "nothing yet");
  }
}

export class Clients {
  constructor(part, parent) {
    this.part = part;
    this.parent = parent;
    this.names = "";
  }

  /** Show a row for each of `clients`, whose first column names it, in the order in which they are told: whoever was heard of last comes first. */
  show(clients) {
    this.part.hidden = !clients.length;
    if (!clients.length) return;
    const names = Object.keys(clients[0]);
    if (names.join() !== this.names) {
      this.names = names.join();
      const columns = names.map((head) => ({ head, number: typeof clients[0][head] === "number" }));
      this.table = new Table("Clients", columns);
      this.parent.replaceChildren(this.table.element);
    }
    const text = (value) => (typeof value === "number" ? number(value) : String(value));
    this.table.show(clients.map((client) => ({
      key: JSON.stringify(client[names[0]]), cells: names.map((name) => text(client[name])),
    })), "none");
  }
}

/** What was counted of the model chosen, or of all, since the start. */
export function countsOf(models, label) {
  return ofModel(Object.fromEntries(Object.entries(models).map(([name, { counts = {} }]) => [name, counts])), label);
}
