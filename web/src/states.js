// The table of the states at the chosen time.

import { bar, fill, h } from "./dom.js";
import { information } from "./store.js";
import { count, excerpt, percent, plural, probability, quoted } from "./words.js";

const MOST_ROWS = 300;
const ROOM = 22; // characters of a text
const NARROW = { width: 620, room: 14 };
const HEADS = {
  state: ["State", "numbered from the oldest"],
  span: ["Tokens", "first and last token of the stretch"],
  text: ["Text", "beginning and end of it"],
  tokens: ["Count", "how many tokens it sums up"],
  information: ["Information", "the sum of its tokens' scores"],
  density: ["Density", "information per token"],
  merged: ["Merged from", "how many states became this one"],
};
const READ = {
  lam: ["λ", "what it counts for in this token's read"],
  share: ["Part of read", "its share in what the token read here"],
  effect: ["If left out", "how far the prediction moves without it, and the likeliest token's probability then"],
};

export class StatesTable {
  constructor(side, { onPick }) {
    this.side = side;
    this.onPick = onPick;
    this.table = h("table", { class: "states" });
    this.element = h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "table of states" }, this.table);
    this.line = h("p", { class: "token", role: "status" }); // about the chosen state
  }

  // reads: what a query read, by start of a state; null if the chosen time is not a query's.
  show({ spans, lives, head, picked, found, reads, candidates }) {
    const { state, span, text, ...rest } = HEADS;
    const heads = { state, span, text, ...(reads ? READ : {}), ...rest };
    const title = h("tr", {}, Object.entries(heads).map(([name, [text, about]]) => h("th", { scope: "col", class: name, title: about }, text)));
    const hidden = Math.max(0, spans.length - MOST_ROWS);
    const largest = reads ? Math.max(...[...reads.values()].map((read) => read.lam), 0) : 0;
    const rows = spans.slice(hidden).map((span, i) => this.row(hidden + i, span, lives, head, picked, found, reads, largest));
    const note = hidden ? [h("tr", {}, h("td", { colspan: "7" }, `${plural(hidden, "older state")} not listed`))] : [];
    fill(this.table, h("thead", {}, title), h("tbody", {}, note, rows));
    this.reveal(rows, spans.slice(hidden), picked, reads);
    const chosen = spans.findIndex((span) => span.start === picked);
    this.line.textContent = chosen < 0 ? "" : stateSentence(spans[chosen], chosen, lives, reads?.get(picked), candidates);
  }

  // Bring the chosen state into the window, or the one that was read most.
  reveal(rows, spans, picked, reads) {
    const weight = (span) => reads?.get(span.start)?.share ?? 0;
    const most = spans.reduce((best, span) => (weight(span) > weight(best) ? span : best), spans[0]);
    const wanted = picked ?? (reads && most ? most.start : null);
    const key = [wanted, reads !== null].join();
    const row = rows[spans.findIndex((span) => span.start === wanted)];
    if (key === this.revealed || !row) return;
    this.revealed = key;
    const room = this.element.clientHeight - 2 * row.offsetHeight;
    const top = row.offsetTop - this.element.scrollTop;
    if (top < 0 || top > room) this.element.scrollTop = row.offsetTop - room / 2;
  }

  row(number, span, lives, head, picked, found, reads, largest) {
    const sum = information(head, span);
    const size = span.end - span.start;
    const from = lives.mergedFrom(span);
    const holds = found && found[0] < span.end && found[1] >= span.start;
    const name = [picked === span.start ? "picked" : "", holds ? "found" : ""].join(" ").trim();
    const cells = [
      h("td", { class: "state" }, h("span", { class: `chip c${lives.colours[span.index]}` }, String(number + 1))),
      h("td", { class: "span" }, `${span.start} – ${span.end - 1}`),
      h("td", { class: "text" }, this.button(span, number, window.innerWidth < NARROW.width ? NARROW.room : ROOM)),
      ...(reads ? readCells(reads.get(span.start), largest) : []),
      h("td", { class: "tokens" }, count(size)),
      h("td", { class: "information" }, sum === null ? "–" : sum.toFixed(2)),
      h("td", { class: "density" }, sum === null ? "–" : (sum / size).toFixed(3)),
      h("td", { class: "merged", title: mergedTitle(from) }, from.length > 1 ? plural(from.length, "state") : "itself"),
    ];
    return h("tr", { class: name || undefined, "data-start": String(span.start) }, cells);
  }

  button(span, number, room) {
    const shown = excerptOf(this.side, span, room);
    const label = `state ${number + 1}, tokens ${span.start} to ${span.end - 1}: show it in the text`;
    return h("button", { type: "button", class: "plain", "aria-label": label, onclick: () => this.onPick(span) }, shown || "(no text)");
  }
}

// Beginning and end of a stretch, without putting all of a long one together.
export function excerptOf(side, span, room) {
  const edge = room; // tokens that surely have as many characters, or nearly
  if (span.end - span.start <= 2 * edge) return excerpt(side.textOf(span), room);
  const ends = [[span.start, span.start + edge], [span.end - edge, span.end]].map(([start, end]) => side.textOf({ start, end }));
  return excerpt(ends.join(""), room);
}

function readCells(read, largest) {
  if (!read) return Object.keys(READ).map((name) => h("td", { class: name }, "–"));
  const { lam, share, effect } = read;
  return [
    h("td", { class: "lam" }, lam.toFixed(3), bar(largest ? lam / largest : 0, "quiet")),
    h("td", { class: "share" }, share === null ? "–" : percent(share, 1), share === null ? null : bar(share, "read")),
    h("td", { class: "effect" }, effect ? `${effect.kl.toFixed(3)} bits, ${probability(effect.p[0])}` : "not tried"),
  ];
}

// What made a state, and what the query expects without it.
function stateSentence(span, number, lives, read, candidates) {
  const from = lives.mergedFrom(span);
  const history = from.length > 1 ? `merged from ${mergedTitle(from)}` : mergedTitle(from);
  const born = `State ${number + 1}, tokens ${span.start} to ${span.end - 1}: ${history}.`;
  if (!read?.effect) return born;
  const changes = candidates.map(({ text, p }, i) => `${quoted(text)} ${probability(p)} → ${probability(read.effect.p[i])}`);
  return `${born} Without it the next token would be: ${changes.join(", ")}.`;
}

function mergedTitle(from) {
  if (from.length < 2) return "never merged";
  const shown = from.slice(0, 30).join(", ");
  return `states that began at tokens ${shown}${from.length > 30 ? ", …" : ""}`;
}
