// Pods: their role, whether they serve, and how much they have to do.

import { byId, fill, list, make, say, share } from "./dom.js";
import { count, percent, plural, uptime } from "./format.js";

const KINDS = { ready: "good", starting: "warn", draining: "warn", unreachable: "bad", gone: "bad" };

export function show(state) {
  const { pods, requests } = state;
  const ready = pods.filter((pod) => pod.state === "ready").length;
  say(byId("pods-count"), `${ready} of ${state.num_pods} ready`);
  byId("no-pods").hidden = pods.length > 0;
  const hits = hitsByPod(requests);
  list(byId("pods"), pods, (pod) => pod.id, create, (row, pod) => update(row, pod, hits.get(pod.id)));
}

function create(pod) {
  const name = make("th", "", pod.id, " ", make("span", "light", pod.role));
  name.scope = "row";
  return make(
    "tr",
    "",
    name,
    make("td", "", make("span")),
    make("td", "", share()),
    make("td", "wide number"),
    make("td", "", share()),
    make("td", "wide"),
  );
}

function update(row, pod, hits) {
  const gone = pod.state === "gone";
  const [, state, requests, tokens, blocks, cached] = row.children;
  row.className = gone ? "gone" : "";
  state.firstElementChild.className = `state ${KINDS[pod.state] ?? "warn"}`;
  say(state.firstElementChild, gone ? `gone ${uptime(pod.gone_seconds)} ago` : pod.state);
  const load = pod.running + pod.waiting;
  const used = pod.num_blocks - pod.free_blocks;
  fill(requests.firstElementChild, gone ? null : load / Math.max(1, load + pod.credits), gone ? "–" : loadText(pod));
  say(tokens, gone ? "–" : plural(pod.waiting_tokens, "token"));
  fill(blocks.firstElementChild, gone ? null : used / Math.max(1, pod.num_blocks), gone ? "–" : blocksText(pod, used));
  say(cached, hits ? `${percent(hits.cached, hits.prompt)} of ${count(hits.prompt)} tokens` : "–");
}

const loadText = ({ running, waiting }) => (waiting ? `${running} + ${waiting} waiting` : String(running));

const blocksText = (pod, used) => `${count(used)} / ${count(pod.num_blocks)}`;

/** Of the requests shown, by the pod that computed the prompt. */
function hitsByPod(requests) {
  const hits = new Map();
  for (const request of requests) {
    if (!request.decode || !request.output_tokens) continue;
    const pod = request.prefill || request.decode;
    const so = hits.get(pod) ?? { cached: 0, prompt: 0 };
    hits.set(pod, { cached: so.cached + request.cached_tokens, prompt: so.prompt + request.prompt_tokens });
  }
  return hits;
}
