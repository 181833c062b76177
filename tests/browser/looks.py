"""What is measured on a page, by scripts that run in it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

_CONTRASTS = """() => {
  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = ([r, g, b, a], [x, y, z]) => [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a), 1];
  const background = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255, 1]);
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((part) => {
      const c = part / 255;
      return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const found = [];
  const measure = (element, text, color) => {
    const behind = background(element);
    found.push([text.trim().slice(0, 40), ratio(over(parse(color), behind), behind)]);
  };
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (words.nextNode()) {
    const element = words.currentNode.parentElement;
    const text = words.currentNode.textContent;
    if (text.trim() && element.checkVisibility({ visibilityProperty: true }) && !element.closest("noscript, script"))
      measure(element, text, getComputedStyle(element).color);
  }
  for (const input of document.querySelectorAll("input, textarea")) {
    if (!input.checkVisibility()) continue;
    measure(input, `in ${input.id}`, getComputedStyle(input).color);
    if (input.placeholder) measure(input, input.placeholder, getComputedStyle(input, "::placeholder").color);
  }
  for (const part of document.querySelectorAll(".bar > span")) {
    const color = getComputedStyle(part).backgroundColor;
    found.push([`bar ${part.className}`, ratio(parse(color), background(part.parentElement)) * 1.5]);
  }
  return found;
}"""
"""Text wants 4.5, a bar's part 3: times 1.5 both want 4.5."""


def contrasts(page: "Page") -> list[tuple[str, float]]:
    """Of all visible text, and of the parts of bars: what it is, and its contrast by WCAG 2, of which 4.5 is enough."""
    return [(text, ratio) for text, ratio in page.evaluate(_CONTRASTS)]


def beside(page: "Page") -> list[str]:
    """What can be scrolled sideways, the page itself or a part of it."""
    return [
        str(found)
        for found in page.evaluate(
            """() => [...document.querySelectorAll("html, body *")]
              .filter((one) => one.checkVisibility() && one.clientWidth && one.scrollWidth > one.clientWidth)
              .filter((one) => one === document.documentElement || ["auto", "scroll"].includes(getComputedStyle(one).overflowX))
              .map((one) => `${one.tagName} ${one.id} ${one.className} ${one.scrollWidth} > ${one.clientWidth}`)"""
        )
    ]


def has_visible_focus(page: "Page") -> bool:
    """What has the focus shows it, and is inside the window."""
    return bool(
        page.evaluate(
            """() => {
              const element = document.activeElement;
              const style = getComputedStyle(element);
              const at = element.getBoundingClientRect();
              const inside = at.bottom > 0 && at.right > 0 && at.top < innerHeight && at.left < innerWidth;
              return inside && style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
            }"""
        )
    )
