// The API key: asked for when the router wants one, kept for this tab, and never a part of an address.

import { byId, say } from "./dom.js";

const NAME = "kvrelay-api-key";

/** An event of the window: there is another key. */
export const GIVEN = "key-given";

export class NoKey extends Error {}

let asking = null;

export const stored = () => sessionStorage.getItem(NAME);

/** Waits for the user to give a key. All who ask at a time get the same one. Throws NoKey where the user does not want to. */
export function request() {
  asking ??= ask().finally(() => {
    asking = null;
  });
  return asking;
}

function ask() {
  const dialog = byId("key-dialog");
  const input = byId("key");
  const form = byId("key-form");
  say(byId("key-refused"), stored() === null ? "" : "The router does not know this key.");
  sessionStorage.removeItem(NAME);
  form.reset();
  dialog.showModal();
  input.focus();
  return new Promise((resolve, reject) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(NAME, input.value.trim());
      dialog.close("given");
    };
    byId("key-cancel").onclick = () => dialog.close("");
    dialog.onclose = () => {
      const given = dialog.returnValue === "given";
      dialog.returnValue = "";
      form.reset();
      byId("change-key").hidden = false;
      if (given) {
        resolve();
        dispatchEvent(new Event(GIVEN));
      } else reject(new NoKey("The router wants an API key."));
    };
  });
}

/** Headers that carry the key: as its UTF-8 bytes, which is what the router compares. */
export function headers() {
  const key = stored();
  if (key === null) return {};
  return { Authorization: `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}` };
}
