// Draws status.json once a second. Text from the server is only ever set as text, never as markup.
"use strict";

const PERIOD_MS = 1000;
const KEPT = 512; // steps, as the server keeps
const SVG = "http://www.w3.org/2000/svg";

const at = (id) => document.getElementById(id);
const histories = new Map(); // of each job, by name
let rates = new Map(); // of each job: its counters a moment ago

function made(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return `${unit === 0 || count >= 100 ? count.toFixed(0) : count.toFixed(1)} ${units[unit]}`;
}

function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 1 ? `${number(value * 1e3)} ms` : `${number(value)} s`;
}

function speed(value) {
  if (value === null || value === undefined) return "–";
  return value < 1e9 ? `${number(value / 1e6)} MB/s` : `${number(value / 1e9)} GB/s`;
}

function count(value) {
  for (const [unit, size] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["K", 1e3]]) {
    if (value >= size) return `${number(value / size)} ${unit}`;
  }
  return String(value);
}

function many(value, what) {
  return `${value} ${what}${value === 1 ? "" : "s"}`;
}

function trouble(text, warn = false) {
  return made("p", { class: warn ? "trouble warn" : "trouble" }, text);
}

/** One line over the last steps. Skipped steps are dots on the upper edge. */
function chart(title, steps, value, show) {
  const points = steps.map((step) => [step.step, value(step), step.skipped]).filter(([, y]) => Number.isFinite(y));
  const last = points.length ? show(points[points.length - 1][1]) : "–";
  const figure = made("figure", { tabindex: "0" }, made("figcaption", {}, made("h3", {}, title), made("span", {}, last)));
  if (points.length < 2) return figure;
  const ys = points.map(([, y]) => y);
  let [low, high] = [Math.min(...ys), Math.max(...ys)];
  const range = low === high ? show(low) : `${show(low)} to ${show(high)}`;
  if (low === high) { low -= Math.abs(low) * 0.05 || 1; high += Math.abs(high) * 0.05 || 1; }
  const [first, newest] = [points[0][0], points[points.length - 1][0]];
  const x = (step) => (300 * (step - first)) / (newest - first);
  const y = (level) => 4 + (82 * (high - level)) / (high - low);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 300 90");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${title}, steps ${first} to ${newest}: ${range}, now ${last}`);
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", points.map(([step, level], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(level).toFixed(1)}`).join(""));
  svg.append(path);
  for (const [step, , skipped] of points) {
    if (!skipped) continue;
    const dot = document.createElementNS(SVG, "circle");
    dot.setAttribute("cx", x(step).toFixed(1));
    dot.setAttribute("cy", "4");
    dot.setAttribute("r", "2.5");
    svg.append(dot);
  }
  figure.append(svg, made("div", { class: "range" }, made("span", {}, range),
    made("span", {}, `steps ${first} to ${newest}`)));
  return figure;
}

function fact(name, value) {
  return made("div", {}, made("dt", {}, name), made("dd", {}, value));
}

/** What a job's counters moved by in a second, over the last few answers. */
function rate(job, now) {
  const seen = rates.get(job.name) ?? [];
  seen.push({ now, pushed: job.pushed_bytes, pulled: job.pulled_bytes, update: job.update_seconds, applied: job.applied });
  while (seen.length > 6) seen.shift();
  rates.set(job.name, seen);
  const [then, latest] = [seen[0], seen[seen.length - 1]];
  const spent = (latest.now - then.now) / 1e3;
  if (spent <= 0) return null;
  const busy = latest.update - then.update;
  const moved = (latest.applied - then.applied) * job.update_bytes;
  return {
    pushed: (latest.pushed - then.pushed) / spent,
    pulled: (latest.pulled - then.pulled) / spent,
    update: busy > 0 && moved > 0 ? moved / busy : null,
  };
}

function history(job) {
  const known = histories.get(job.name) ?? [];
  const first = job.steps.length ? job.steps[0].step : Infinity;
  // A step that was taken back and decided again comes once more.
  const steps = known.filter((step) => step.step < first && step.step <= job.version).concat(job.steps).slice(-KEPT);
  histories.set(job.name, steps);
  return steps;
}

/** What an operator should know of a job that does not train as it should. */
function troubles(job, now) {
  const found = [];
  if (job.state === "failed") found.push(trouble(`${job.name} cannot go on from this server: ${job.reason}`));
  if (job.state === "paused") found.push(trouble(`${job.name} is paused: ${job.reason}`, true));
  if (job.state === "loading") found.push(trouble(`${job.name} is being filled: ${job.reason}`, true));
  if (job.checkpoint && job.checkpoint.failure) found.push(trouble(`The last checkpoint of ${job.name} failed: ${job.checkpoint.failure}`));
  const last = job.steps.length ? job.steps[job.steps.length - 1] : histories.get(job.name)?.at(-1);
  const usual = histories.get(job.name)?.map((step) => step.seconds).filter((value) => value !== null).sort((a, b) => a - b);
  const median = usual?.length ? usual[usual.length >> 1] : 0;
  const silent = last ? (now - last.at_ms) / 1e3 : 0;
  if (job.state === "training" && job.waiting_for && silent > Math.max(5, 5 * median)) {
    found.push(trouble(`${job.name} has decided nothing for ${seconds(silent)}. It waits for ${job.waiting_for}.`, true));
  }
  return found;
}

function card(job, now) {
  const steps = history(job);
  const moving = rate(job, now);
  const last = steps[steps.length - 1];
  const times = steps.slice(-64).map((step) => step.seconds).filter((value) => value !== null);
  const mean = times.length ? times.reduce((sum, value) => sum + value, 0) / times.length : null;
  const facts = made("dl", {},
    fact("version", `${job.version}, ${job.applied} applied`),
    fact("step, mean of 64", seconds(mean)),
    fact("model", `${count(job.parameters)} parameters, ${job.tensors} tensors`),
    fact("workers", `${many(job.world_size, "rank")}, ${many(job.micro_steps, "micro-step")}`),
    fact("server", `${job.server + 1} of ${job.servers}, ${job.threads} × ${job.isa}`),
    fact("rule and tier", `${job.rule}, ${job.tier}`),
    fact("pushed, pulled", moving ? `${speed(moving.pushed)}, ${speed(moving.pulled)}` : "–"),
    fact("update", moving ? speed(moving.update) : "–"),
    fact("learning rate", last ? number(last.learning_rate) : "–"),
    fact("memory", bytes(job.memory_bytes)),
    job.drive_bytes ? fact("drives", `${bytes(job.drive_bytes)}, ${bytes(job.written_bytes)} written`) : null,
    job.checkpoint && job.checkpoint.name ? fact("last checkpoint", `${job.checkpoint.name}, version ${job.checkpoint.version}`) : null);
  const rows = job.ranks.map((rank) => made("tr", {}, ...[rank.rank, rank.state, rank.transport || "–", rank.last_step]
    .map((value) => made("td", {}, String(value)))));
  const open = document.querySelector(`details[data-job="${CSS.escape(job.name)}"]`)?.open ?? job.world_size <= 8;
  const ranks = made("details", { "data-job": job.name }, made("summary", {}, `${job.ranks.length} of ${job.world_size} ranks`),
    made("div", { class: "scroll" }, made("table", {}, made("thead", {}, made("tr", {},
      ...["rank", "state", "transport", "last step"].map((name) => made("th", { scope: "col" }, name)))), made("tbody", {}, ...rows))));
  ranks.open = open;
  return made("article", { class: "job" },
    made("div", { class: "head" }, made("h2", {}, job.name), made("span", { class: `state ${job.state}` }, job.state),
      made("span", { class: "quiet" }, job.waiting_for ? `waits for ${job.waiting_for}` : "")),
    facts,
    made("div", { class: "charts" }, ...[
      steps.some((step) => step.loss !== null) ? chart("loss", steps, (step) => step.loss ?? NaN, number) : null,
      chart("step time", steps, (step) => step.seconds ?? NaN, seconds),
      steps.some((step) => step.exposed_seconds !== null)
        ? chart("exposed time", steps, (step) => step.exposed_seconds ?? NaN, seconds) : null,
      chart("gradient norm", steps, (step) => (step.skipped ? NaN : step.norm), number),
      chart("loss scale", steps, (step) => step.loss_scale, number),
      chart("learning rate", steps, (step) => step.learning_rate, number),
    ].filter((figure) => figure !== null)),
    ranks);
}

function draw(status) {
  at("server").textContent = `${location.host} · ${status.release} · ${many(status.jobs.length, "job")} · ${many(status.connections, "connection")}`;
  const wrong = status.jobs.flatMap((job) => troubles(job, status.unix_ms));
  for (const job of status.away) wrong.push(trouble(`${job.name} is not served: ${job.reason}`));
  if (status.draining) wrong.unshift(trouble("This server drains: it finishes the step in hand and stops.", true));
  at("troubles").replaceChildren(...wrong);
  const { budget, reserved, resident } = status.memory;
  const bar = made("div", { class: "bar" }, made("span"));
  bar.firstChild.style.width = `${Math.min(100, (100 * reserved) / Math.max(1, budget))}%`;
  at("memory").replaceChildren(made("p", { class: "quiet" },
    `memory: ${bytes(reserved)} of ${bytes(budget)} reserved by jobs${resident ? `, ${bytes(resident)} resident` : ""}`), bar);
  const focused = document.activeElement?.closest?.("article figure, summary");
  const place = focused ? [...document.querySelectorAll("article figure, summary")].indexOf(focused) : -1;
  at("jobs").replaceChildren(...status.jobs.map((job) => card(job, status.unix_ms)));
  if (place >= 0) document.querySelectorAll("article figure, summary")[place]?.focus({ preventScroll: true });
  at("idle").hidden = status.jobs.length + status.away.length > 0;
}

/** The step after which every job's steps are still wanted. */
function wanted() {
  const newest = [...histories.values()].map((steps) => steps.at(-1)?.step ?? 0);
  return newest.length ? Math.max(0, Math.min(...newest) - 2) : 0;
}

async function turn() {
  try {
    const answer = await fetch(`status.json?after=${wanted()}`, { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
    const status = await answer.json();
    for (const name of histories.keys()) if (!status.jobs.some((job) => job.name === name)) histories.delete(name);
    draw(status);
  } catch (error) {
    at("troubles").replaceChildren(trouble(`The server does not answer (${error.message}). What is below is old. Is it running?`));
  }
  setTimeout(turn, PERIOD_MS);
}

for (const id of ["here", "here2"]) at(id).textContent = location.hostname + ":7070";
turn();
