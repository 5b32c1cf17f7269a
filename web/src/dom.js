// Elements made of values: a text becomes a text node, never markup.

export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
}

// A bar as wide as a share of its cell.
export function bar(share, kind) {
  const inner = h("span", { class: `bar ${kind}`, "aria-hidden": "true" });
  inner.style.setProperty("--share", String(Math.min(1, Math.max(0, share))));
  return inner;
}

export function choices(select, names, chosen) {
  fill(select, names.map((name, i) => h("option", { value: String(i), selected: i === chosen }, name)));
}
