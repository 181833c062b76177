// Calls to the router that served this page, and to nothing else.

import * as key from "./key.js";

const ROOT = new URL("..", import.meta.url);

/** The answer, whatever its status, but that the user is asked for a key as long as the router wants another. Throws NoKey. */
export async function call(path, options = {}) {
  for (;;) {
    const sent = key.stored();
    const answer = await fetch(new URL(path, ROOT), {
      ...options,
      cache: "no-store",
      headers: { ...options.headers, ...key.headers() },
    });
    if (answer.status !== 401) return answer;
    if (sent === key.stored()) await key.request();
  }
}

/** What the router says of an answer that is an error. */
export async function reason(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The router answered with status ${answer.status}.`;
  }
}
