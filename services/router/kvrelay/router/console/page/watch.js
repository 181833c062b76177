// Asks for the router's state, once a second for as long as the page is looked at and not paused.

import { call, reason } from "./api.js";
import { GIVEN, NoKey, request } from "./key.js";
import { byId, say } from "./dom.js";

const EVERY_MS = 1000;
const AFTER_FAILURE_MS = 2500;

const pause = byId("pause");
const link = byId("link");
let wake = () => {};

const isPaused = () => pause.getAttribute("aria-pressed") === "true";

function tell(text, kind) {
  link.className = `link ${kind}`;
  say(link, text);
}

const rest = (ms) =>
  new Promise((resolve) => {
    wake = resolve;
    if (ms !== Infinity) setTimeout(resolve, ms);
  });

/** For ever. `show` is given each state. */
export async function watch(show) {
  pause.addEventListener("click", () => {
    pause.setAttribute("aria-pressed", String(!isPaused()));
    wake();
  });
  byId("change-key").addEventListener("click", () => request().catch(() => {}));
  addEventListener(GIVEN, () => wake());
  document.addEventListener("visibilitychange", () => wake());
  for (;;) {
    if (isPaused()) tell("Paused", "muted");
    if (isPaused() || document.hidden) await rest(Infinity);
    else await rest(await look(show));
  }
}

/** How long to rest after it. */
async function look(show) {
  let state;
  try {
    const answer = await call("console/api/state");
    if (!answer.ok) {
      tell(await reason(answer), "bad");
      return AFTER_FAILURE_MS;
    }
    state = await answer.json();
  } catch (error) {
    if (error instanceof NoKey) {
      tell("Locked: the router wants an API key", "warn");
      return Infinity;
    }
    tell("The router does not answer", "bad");
    return AFTER_FAILURE_MS;
  }
  show(state);
  if (state.router.ready) tell("Live", "good");
  else tell(`Not ready: ${state.router.reason}`, "warn");
  return EVERY_MS;
}
