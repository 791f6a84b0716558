// Draws status.json once a second. Text from the server is only ever set as text, never as markup.
"use strict";

const PERIOD_MS = 1000;
const KEPT = 512; // steps kept, the server's number
const MEAN_OF = 8; // steps that a drawn speed averages
const QUERY = 16384; // characters of a query: all headers stay below the server's limit of 32 KiB
const SVG = "http://www.w3.org/2000/svg";

const at = (id) => document.getElementById(id);
const known = new Map(); // jobs of the last answer, by name: steps, counters, and whether the next request asks for all steps
let wrong = ""; // the troubles shown, as JSON

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

/** Returns a trouble with its remedy. `since` is its start; the duration is hidden from screen readers, as it changes each second. */
function trouble(what, { remedy = "", warn = false, since = null } = {}) {
  return { what: remedy ? `${what.replace(/[.]$/, "")}. Remedy: ${remedy}.` : what, warn, since };
}

/** Shows the troubles. Unchanged ones are not replaced, since screen readers speak replaced text. */
function say(troubles, now) {
  const said = JSON.stringify(troubles);
  if (said !== wrong) {
    at("troubles").replaceChildren(...troubles.map(({ what, warn, since }) => made("p", { class: warn ? "trouble warn" : "trouble" }, what,
      since === null ? null : made("span", { class: "since quiet", "aria-hidden": "true", "data-since": since }))));
    wrong = said;
  }
  for (const span of document.querySelectorAll(".since")) span.textContent = ` (${seconds(Math.round((now - span.dataset.since) / 1e3))})`;
}

function time(ms) {
  const [then, now] = [new Date(ms), new Date()];
  return then.toDateString() === now.toDateString() ? then.toLocaleTimeString() : then.toLocaleString();
}

/** Draws a line over the last steps. Skipped steps are dots on the upper edge. */
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

/** Merges a job of this answer into `known`. */
function learn(job, now) {
  const { steps: old, counts } = known.get(job.name) ?? { steps: [], counts: [] };
  const first = job.steps.length ? job.steps[0].step : Infinity;
  // A step that was taken back and decided again arrives again.
  const steps = old.filter((step) => step.step < first && step.step <= job.version).concat(job.steps).slice(-KEPT);
  // If the job stepped back, or another job has its name, later steps may have been decided anew since.
  const anew = old.length > 0 && old[old.length - 1].step > job.version;
  const count = { now, pushed: job.pushed_bytes, pulled: job.pulled_bytes, update: job.update_seconds, applied: job.applied };
  const last = counts[counts.length - 1];
  // Counters restart with the server's process and with the job.
  if (last && fell(last, count, ["now", "pushed", "pulled", "update", "applied"])) counts.length = 0;
  counts.push(count);
  known.set(job.name, { steps, counts: counts.slice(-6), anew });
}

function fell(before, after, names) {
  return names.some((name) => after[name] < before[name]);
}

/** Returns the rates of a job's counters in a second, over the last few answers. */
function rate(job) {
  const { counts } = known.get(job.name);
  const [then, latest] = [counts[0], counts[counts.length - 1]];
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

/** Returns the steps with a speed at each, the mean over the steps before it. An update is done after its decision. */
function withSpeeds(steps, updateBytes) {
  let begin = 0;
  return steps.map((step, i) => {
    const before = steps[i - 1];
    if (i > 0 && (step.step !== before.step + 1 || step.seconds === null || fell(before, step, ["pushed_bytes", "pulled_bytes", "update_seconds"]))) {
      begin = i;
    }
    begin = Math.max(begin, i - MEAN_OF);
    const then = steps[begin];
    const run = steps.slice(begin + 1, i + 1);
    const spent = run.reduce((sum, { seconds }) => sum + seconds, 0);
    const busy = step.update_seconds - then.update_seconds;
    const updates = steps.slice(begin, i).filter(({ skipped }) => !skipped).length;
    return {
      ...step,
      pushed: spent > 0 ? (step.pushed_bytes - then.pushed_bytes) / spent : NaN,
      pulled: spent > 0 ? (step.pulled_bytes - then.pulled_bytes) / spent : NaN,
      updated: busy > 0 && updates > 0 ? (updates * updateBytes) / busy : NaN,
    };
  });
}

/** Returns the troubles of a job for its operator. */
function troubles(job, now) {
  const found = [];
  const { remedy } = job;
  if (job.state === "failed") found.push(trouble(`${job.name} cannot go on from this server: ${job.reason}`, { remedy }));
  if (job.state === "paused") found.push(trouble(`${job.name} is paused: ${job.reason}`, { remedy, warn: true }));
  if (job.state === "loading") found.push(trouble(`${job.name} is being filled: ${job.reason}`, { remedy, warn: true }));
  const { checkpoint } = job;
  if (checkpoint && checkpoint.failure) {
    found.push(trouble(`The last checkpoint of ${job.name} failed: ${checkpoint.failure}`, { remedy: checkpoint.remedy }));
  }
  const { steps } = known.get(job.name);
  const last = steps[steps.length - 1];
  const usual = steps.map((step) => step.seconds).filter((value) => value !== null).sort((a, b) => a - b);
  const median = usual.length ? usual[usual.length >> 1] : 0;
  const silent = last ? (now - last.at_ms) / 1e3 : 0;
  if (["training", "idle"].includes(job.state) && job.waiting_for && silent > Math.max(5, 5 * median)) {
    const what = `${job.name} has decided nothing since ${time(last.at_ms)}. It waits for ${job.waiting_for}`;
    found.push(trouble(what, { remedy, warn: true, since: last.at_ms }));
  }
  return found;
}

function table(heads, rows) {
  const cells = (name, values) => values.map((value) => made(name, name === "th" ? { scope: "col" } : {}, String(value)));
  return made("div", { class: "scroll" }, made("table", {}, made("thead", {}, made("tr", {}, ...cells("th", heads))),
    made("tbody", {}, ...rows.map((row) => made("tr", {}, ...cells("td", row))))));
}

/** Returns a collapsible element that keeps its open state across redraws. */
function details(id, summary, open, ...children) {
  const shown = made("details", { "data-keep": id }, made("summary", {}, summary), ...children);
  shown.open = document.querySelector(`details[data-keep="${CSS.escape(id)}"]`)?.open ?? open;
  return shown;
}

function bar(share) {
  const whole = made("div", { class: "bar" }, made("span"));
  whole.firstChild.style.width = `${Math.min(100, 100 * share)}%`;
  return whole;
}

/** Draws the use of memory and drives: in total, by drive, by job and by owner. */
function room(status) {
  const { budget, reserved, resident } = status.memory;
  const parts = [made("p", { class: "quiet" },
    `memory: ${bytes(reserved)} of ${bytes(budget)} reserved by jobs${resident ? `, ${bytes(resident)} resident` : ""}`),
  bar(reserved / Math.max(1, budget))];
  for (const { folder, bytes: all, free_bytes: free } of status.drives) {
    parts.push(made("p", { class: "quiet" }, `drive ${folder}: ${all === null ? "its room is not known" : `${bytes(free)} free of ${bytes(all)}`}`));
    if (all !== null) parts.push(bar((all - free) / all));
  }
  const takers = status.jobs.map((job) => [job.name, job.owner ?? "–", bytes(job.memory_bytes),
    job.drive_bytes ? bytes(job.drive_bytes) : "–", job.written_bytes ? bytes(job.written_bytes) : "–"]);
  const inside = takers.length ? [table(["job", "owner", "memory", "drives", "written"], takers)] : [];
  const of = ({ now, limit }, show) => (limit === null ? show(now) : `${show(now)} of ${show(limit)}`);
  if (status.identities.length) {
    inside.push(table(["identity", "jobs", "memory", "drives", "connections"], status.identities.map((one) => [one.name, of(one.jobs, String),
      of(one.memory_bytes, bytes), of(one.drive_bytes, bytes), of(one.connections, String)])));
  }
  if (inside.length) parts.push(details("room", "where memory and drives go", false, ...inside));
  return parts;
}

/** Returns a line about a change of the job's servers, or null once it is over. */
function moves(scaling) {
  if (!scaling || (scaling.is_reached && scaling.awaited_shards === 0)) return null;
  const fetched = `this server awaits ${many(scaling.awaited_shards, "shard")} and has fetched ${bytes(scaling.fetched_bytes)}`;
  return made("p", { class: "quiet moves" }, `moves to ${scaling.wanted.join(", ")}: ${fetched}${scaling.failure ? `. ${scaling.failure}` : ""}`);
}

function card(job) {
  const steps = withSpeeds(known.get(job.name).steps, job.update_bytes);
  const moving = rate(job);
  const last = steps[steps.length - 1];
  const times = steps.slice(-64).map((step) => step.seconds).filter((value) => value !== null);
  const mean = times.length ? times.reduce((sum, value) => sum + value, 0) / times.length : null;
  const facts = made("dl", {},
    fact("version", `${job.version}, ${job.applied} applied`),
    fact("step, mean of 64", seconds(mean)),
    fact("model", `${count(job.parameters)} parameters, ${job.tensors} tensors`),
    fact("workers", `${many(job.world_size, "rank")}, ${many(job.micro_steps, "micro-step")}`),
    fact("server", `one of ${job.servers}, ${job.threads} × ${job.isa}`),
    fact("rule and tier", `${job.rule}, ${job.tier}`),
    fact("pushed, pulled", moving ? `${speed(moving.pushed)}, ${speed(moving.pulled)}` : "–"),
    fact("update", moving ? speed(moving.update) : "–"),
    fact("learning rate", last ? number(last.learning_rate) : "–"),
    fact("memory", bytes(job.memory_bytes)),
    job.drive_bytes ? fact("drives", `${bytes(job.drive_bytes)}, ${bytes(job.written_bytes)} written`) : null,
    job.checkpoint && job.checkpoint.name ? fact("last checkpoint", `${job.checkpoint.name}, version ${job.checkpoint.version}`) : null);
  const ranks = details(`ranks of ${job.name}`, `${job.ranks.length} of ${job.world_size} ranks`, job.world_size <= 8,
    table(["rank", "state", "transport", "last step"], job.ranks.map((rank) => [rank.rank, rank.state, rank.transport || "–", rank.last_step])));
  const { members, scaling } = job;
  const servers = members.length < 2 ? null : details(`servers of ${job.name}`, many(members.length, "server"), members.length <= 8,
    table(["server", "shards", "elements", "arriving"], members.map((one) => [one.address, one.shards, count(one.elements), one.arriving])));
  return made("article", { class: "job" },
    made("div", { class: "head" }, made("h2", {}, job.name), made("span", { class: `state ${job.state}` }, job.state),
      made("span", { class: "quiet" }, job.waiting_for ? `waits for ${job.waiting_for}` : "")),
    moves(scaling),
    facts,
    made("div", { class: "charts" }, ...[
      steps.some((step) => step.loss !== null) ? chart("loss", steps, (step) => step.loss ?? NaN, number) : null,
      chart("step time", steps, (step) => step.seconds ?? NaN, seconds),
      steps.some((step) => step.exposed_seconds !== null)
        ? chart("exposed time", steps, (step) => step.exposed_seconds ?? NaN, seconds) : null,
      chart("gradient norm", steps, (step) => (step.skipped ? NaN : step.norm), number),
      chart("loss scale", steps, (step) => step.loss_scale, number),
      chart("learning rate", steps, (step) => step.learning_rate, number),
      ...[["pushed", "pushes"], ["pulled", "pulls"], ["updated", "updates"]].map(([name, title]) => (
        steps.some((step) => step[name] > 0) ? chart(title, steps, (step) => step[name], speed) : null)),
    ].filter((figure) => figure !== null)),
    ranks, servers);
}

function draw(status) {
  const { unix_ms: now, jobs, away } = status;
  const server = `${location.host} · ${status.release} · ${many(jobs.length, "job")} · ${many(status.connections, "connection")}`;
  if (at("server").textContent !== server) at("server").textContent = server;
  const found = jobs.flatMap((job) => troubles(job, now));
  for (const job of away) found.push(trouble(`${job.name} is not served: ${job.reason}`));
  if (status.draining) found.unshift(trouble("This server drains: it finishes the step in hand and stops.", { warn: true }));
  say(found, now);
  const kept = () => [...document.querySelectorAll("article figure, summary")];
  const place = kept().indexOf(document.activeElement?.closest?.("article figure, summary"));
  const scrolled = [...document.querySelectorAll(".scroll")].map((element) => element.scrollLeft);
  at("room").replaceChildren(...room(status));
  at("jobs").replaceChildren(...jobs.map(card));
  if (place >= 0) kept()[place]?.focus({ preventScroll: true });
  document.querySelectorAll(".scroll").forEach((element, i) => { element.scrollLeft = scrolled[i] ?? 0; });
  at("idle").hidden = jobs.length + away.length > 0;
  const servers = reached(status.listen);
  for (const [id, text] of [["here", servers + (status.listen.tls ? " --tls-dir FOLDER" : "")], ["here2", servers]]) {
    if (at(id).textContent !== text) at(id).textContent = text;
  }
}

/** Returns the address at which workers reach the server. A server that listens on all addresses is reached at this page's host. */
function reached({ address }) {
  const port = address.slice(address.lastIndexOf(":") + 1);
  return /^(0[.]0[.]0[.]0|\[::\]):/.test(address) ? `${location.hostname}:${port}` : address;
}

/** Returns the query that names the last known step of each job. */
function wanted() {
  const query = new URLSearchParams();
  for (const [name, { steps, anew }] of known) {
    const step = anew ? 0 : (steps[steps.length - 1]?.step ?? 0) - 2;
    if (step > 0) query.append("after", `${name}:${step}`);
    // The query is full after some hundreds of jobs; later jobs send all their steps.
    if (query.toString().length > QUERY) break;
  }
  return query;
}

async function turn() {
  let status;
  try {
    const answer = await fetch(`status.json?${wanted()}`, { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
    status = await answer.json();
  } catch (error) {
    say([trouble(`The server does not answer (${error.message}). What is below is old. Is it running?`)], 0);
  }
  setTimeout(turn, PERIOD_MS);
  if (!status) return;
  try {
    for (const name of known.keys()) if (!status.jobs.some((job) => job.name === name)) known.delete(name);
    for (const job of status.jobs) learn(job, status.unix_ms);
    draw(status);
  } catch (error) {
    say([trouble("This page fails to draw what the server says, which is a defect of the page: status.json has it.")], 0);
    throw error; // for the console
  }
}

turn();
