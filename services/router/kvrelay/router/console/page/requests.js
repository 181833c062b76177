// The time line: requests, live ones first, and where the time of each went.

import { byId, list, make, say } from "./dom.js";
import { count, milliseconds, plural } from "./format.js";
import { isFailed } from "./summary.js";

const NICE = [1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10];
const PREFIX = /^(chat)?cmpl-/;
const open = new Set();
const own = new Set();
let shown = null;

export function show(state) {
  shown = state;
  const { requests } = state;
  const live = requests.filter(({ status }) => status === "running").length;
  say(byId("requests-count"), live ? `${plural(live, "live one")}, ${count(requests.length - live)} ended` : `${count(requests.length)} ended`);
  byId("no-requests").hidden = requests.length > 0;
  const full = niceScale(Math.max(...requests.map(total), 10));
  say(byId("half"), mark(full / 2));
  say(byId("full"), mark(full));
  for (const number of open) if (!requests.some((request) => request.number === number)) open.delete(number);
  const rows = requests.flatMap((request) => (open.has(request.number) ? [{ request }, { request, details: true }] : [{ request }]));
  list(
    byId("requests"),
    rows,
    ({ request, details }) => (details ? `${request.number} details` : request.number),
    ({ request, details }) => (details ? createDetails(request) : create(request)),
    (row, { request, details }) => (details ? updateDetails(row, request) : update(row, request, full)),
  );
}

/** The request of this id is one of this page's own. */
export function claim(id) {
  own.add(id);
}

const total = ({ phases }) => phases.reduce((sum, [, ms]) => sum + ms, 0);

/** The least round number that is no less. */
function niceScale(ms) {
  const power = 10 ** Math.floor(Math.log10(ms));
  return NICE.map((step) => step * power).find((scale) => scale >= ms);
}

const mark = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${Math.round(ms) / 1000} s`);

function create(request) {
  const button = make("button", "", request.id.replace(PREFIX, ""));
  button.type = "button";
  button.addEventListener("click", () => {
    if (!open.delete(request.number)) open.add(request.number);
    show(shown);
  });
  const name = make("th", "", button);
  name.scope = "row";
  const bar = make("div", "bar");
  bar.setAttribute("role", "img");
  return make(
    "tr",
    "",
    name,
    make("td", "", make("span")),
    make("td", "wide pods"),
    make("td", "wide number", make("span"), " ", make("span", "light")),
    make("td", "wide number"),
    make("td", "line", bar),
    make("td", "number"),
  );
}

function update(row, request, full) {
  const [name, status, pods, prompt, output, line, time] = row.children;
  row.className = [...own].some((id) => isOf(request, id)) ? "own" : "";
  name.firstElementChild.setAttribute("aria-expanded", String(open.has(request.number)));
  status.firstElementChild.className = `state ${kindOf(request)}`;
  say(status.firstElementChild, request.status);
  say(pods, podsText(request));
  say(prompt.firstElementChild, count(request.prompt_tokens));
  say(prompt.lastElementChild, `(${count(request.cached_tokens)})`);
  say(output, count(request.output_tokens));
  say(time, milliseconds(total(request)));
  draw(line.firstElementChild, request.phases, full);
}

function draw(bar, phases, full) {
  bar.setAttribute("aria-label", phasesText(phases));
  while (bar.childElementCount > phases.length) bar.lastElementChild.remove();
  while (bar.childElementCount < phases.length) bar.append(make("span"));
  phases.forEach(([phase, ms], at) => {
    const part = bar.children[at];
    part.className = phase;
    part.style.setProperty("width", `${(100 * ms) / full}%`);
  });
}

function createDetails() {
  const cell = make("td");
  cell.colSpan = 7;
  return make("tr", "details", cell);
}

function updateDetails(row, request) {
  const facts = [
    request.id,
    `${new Date(request.arrived_ms).toLocaleTimeString("en-GB")}`,
    podsText(request),
    plural(request.attempts, "attempt"),
    `${plural(request.prompt_tokens, "prompt token")}, ${count(request.cached_tokens)} reused`,
    `${plural(request.output_tokens, "output token")}`,
    phasesText(request.phases),
    `in logs ${request.log_id}`,
  ];
  say(row.firstElementChild, facts.join(" · "));
}

/** The router tells only the beginning of a longer id. */
const isOf = (request, id) => id === request.id || (request.id.endsWith("…") && id.startsWith(request.id.slice(0, -1)));

const podsText = ({ prefill, decode }) => (prefill ? `${prefill} → ${decode}` : decode || "none yet");

const phasesText = (phases) => phases.map(([phase, ms]) => `${phase} ${milliseconds(ms)}`).join(", ");

function kindOf(request) {
  if (request.status === "running") return "live";
  if (request.status === "ok") return "good";
  return isFailed(request) ? "bad" : "muted";
}
