// The header and the row of figures under it.

import { byId, say } from "./dom.js";
import { count, milliseconds, percent, uptime } from "./format.js";

let former = null;

export function show(state) {
  const { router, requests } = state;
  say(byId("about"), `${router.model} · ${router.policy} · up ${uptime(router.uptime_seconds)}`);
  say(byId("chat-model"), router.model);
  say(byId("running"), count(router.running - router.waiting));
  say(byId("waiting"), count(router.waiting));
  say(byId("output"), `${count(outputRate(state))} tok/s`);
  const firsts = requests.map(firstToken).filter((ms) => ms !== null);
  say(byId("first-token"), firsts.length ? milliseconds(median(firsts)) : "–");
  const computed = requests.filter((request) => request.output_tokens > 0);
  say(byId("reused"), percent(sum(computed, "cached_tokens"), sum(computed, "prompt_tokens")));
  const failed = requests.filter(isFailed).length;
  say(byId("failed"), requests.length ? `${failed} of ${requests.length}` : "–");
}

export const isFailed = ({ status }) => !["running", "ok", "cancelled"].includes(status);

/** Milliseconds; null: there is none yet. */
export function firstToken({ phases, output_tokens: output }) {
  const at = phases.findIndex(([phase]) => phase === "push" || phase === "decode");
  return output > 0 && at >= 0 ? phases.slice(0, at).reduce((total, [, ms]) => total + ms, 0) : null;
}

/** Tokens a second since the state before. */
function outputRate(state) {
  const tokens = new Map(state.requests.map((request) => [request.number, request.output_tokens]));
  const before = former;
  former = { at: state.now_ms, tokens };
  if (before === null || state.now_ms <= before.at) return 0;
  let gained = 0;
  for (const [number, now] of tokens) gained += Math.max(0, now - (before.tokens.get(number) ?? 0));
  return Math.round((1000 * gained) / (state.now_ms - before.at));
}

const sum = (rows, field) => rows.reduce((total, row) => total + row[field], 0);

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}
