// A conversation with the model, by the API that everyone uses.

import { call, reason } from "./api.js";
import { byId, make, say } from "./dom.js";
import { milliseconds, plural } from "./format.js";
import { events } from "./sse.js";

const log = byId("log");
const message = byId("message");
let turns = [];
let answering = null;
let model = "";

/** `claim` is told the id of each request that is made. */
export function start(claim) {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send(claim);
  });
  message.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send(claim);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("key-dialog").open) stop();
  });
  byId("stop").addEventListener("click", stop);
  byId("clear").addEventListener("click", () => {
    stop();
    turns = [];
    log.replaceChildren();
    message.focus();
  });
}

export function show(state) {
  model = state.router.model;
}

function stop() {
  answering?.abort();
}

async function send(claim) {
  const text = message.value.trim();
  if (!text || answering) return;
  message.value = "";
  const asked = [...turns, { role: "user", content: text }];
  add("user", "You").words.textContent = text;
  const turn = add("assistant", model || "Model");
  turn.element.classList.add("live");
  const answer = { text: "", tokens: 0, usage: null, end: "", begin: performance.now(), first: 0, last: 0 };
  answering = new AbortController();
  busy(true);
  try {
    await read(asked, answer, turn, claim);
  } catch (error) {
    answer.end = answering.signal.aborted ? "stopped" : error.message;
  }
  const failed = answer.end && answer.end !== "stopped";
  say(turn.note, noteOf(answer));
  turn.note.classList.toggle("bad", Boolean(failed));
  turn.element.classList.remove("live");
  if (answer.text) turns = turns.length + 1 === asked.length ? [...asked, { role: "assistant", content: answer.text }] : turns;
  say(byId("said"), failed ? `The request failed: ${answer.end}` : `Answer ${answer.end || "complete"}, ${plural(answer.tokens, "token")}`);
  answering = null;
  busy(false);
  follow(true);
}

/** Fills `answer` and shows it. Throws what ends it early. */
async function read(asked, answer, turn, claim) {
  model ||= await servedModel();
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    signal: answering.signal,
    body: JSON.stringify({
      model,
      messages: asked,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      temperature: Number(byId("temperature").value),
      max_tokens: Number(byId("max-tokens").value) || undefined,
    }),
  });
  if (!response.ok) throw new Error(await reason(response));
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    claim(chunk.id);
    answer.usage = chunk.usage ?? answer.usage;
    answer.tokens = answer.usage?.completion_tokens ?? 0;
    const delta = chunk.choices[0]?.delta?.content;
    if (delta) {
      answer.first ||= performance.now();
      answer.last = performance.now();
      answer.text += delta;
      const atEnd = isAtEnd();
      turn.words.append(delta);
      follow(atEnd);
    }
  }
  throw new Error("The answer broke off.");
}

/** Where the router's state has not come yet. */
async function servedModel() {
  const response = await call("v1/models", { signal: answering.signal });
  if (!response.ok) throw new Error(await reason(response));
  return (await response.json()).data[0].id;
}

function add(role, name) {
  const words = make("p", "words");
  const note = make("p", "note muted");
  const element = make("article", `turn ${role}`, make("h3", "", name), words, note);
  log.append(element);
  follow(true);
  return { element, words, note };
}

function noteOf({ tokens, usage, end, begin, first, last }) {
  const parts = [];
  if (usage) {
    const reused = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(plural(tokens, "token"), `first after ${milliseconds(first - begin)}`);
    if (tokens > 1 && last > first) parts.push(`${Math.round(((tokens - 1) * 1000) / (last - first))} tok/s`);
    parts.push(`${reused} of ${plural(usage.prompt_tokens, "prompt token")} reused`);
  }
  return [...parts, ...(end ? [end] : [])].join(" · ");
}

function busy(is) {
  byId("send").disabled = is;
  byId("stop").disabled = !is;
  log.setAttribute("aria-busy", String(is));
}

const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 40;

function follow(wanted) {
  if (wanted) log.scrollTop = log.scrollHeight;
}
