// Elements. Text goes in as text: nothing in this page parses markup.

export const byId = (id) => document.getElementById(id);

export function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

/** Writes only what is new, so that selections and screen readers are left alone. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Makes the children of `parent` one an item, in order. `create(item)` gives an element, `update(element, item)` fills it.
 * Elements stay as long as their item's key does, and move only where they must: one that has the focus keeps it.
 */
export function list(parent, items, keyOf, create, update) {
  const former = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const keys = items.map((item) => String(keyOf(item)));
  const wanted = new Set(keys);
  for (const [key, child] of former) if (!wanted.has(key)) child.remove();
  let next = parent.firstElementChild;
  items.forEach((item, at) => {
    let child = former.get(keys[at]);
    if (!child) {
      child = create(item);
      child.dataset.key = keys[at];
    }
    if (child === next) next = next.nextElementSibling;
    else parent.insertBefore(child, next);
    update(child, item);
  });
}

/** A bar with its number beside it; `fill(element, share, text)` sets both. */
export function share() {
  const fill = make("div", "fill");
  const track = make("div", "track", fill);
  track.setAttribute("aria-hidden", "true");
  return make("div", "share", track, make("span"));
}

/** `part` null: there is nothing to have a share of. */
export function fill(element, part, text) {
  element.firstElementChild.hidden = part === null;
  element.querySelector(".fill").style.setProperty("width", `${Math.round(Math.min(1, Math.max(0, part)) * 100)}%`);
  say(element.lastElementChild, text);
}
