// What a query token read: the prediction, and which states moved it.

import { bar, fill, h } from "./dom.js";
import { excerptOf } from "./states.js";
import { probability, quoted, visible } from "./words.js";

const STRONGEST = 8;
const CONTEXT = 24; // tokens before the query that are shown

export class QueryPanel {
  constructor(side, { onQuery, onState }, mostLeftOut) {
    this.side = side;
    this.onQuery = onQuery;
    this.onState = onState;
    this.mostLeftOut = mostLeftOut;
    this.buttons = side.queries.map((query, i) =>
      h("button", { type: "button", class: "choice", "aria-pressed": "false", onclick: () => onQuery(i) },
        h("b", {}, quoted(side.pieces[query.at])), ` token ${query.at}`));
    this.body = h("div", { class: "asked" });
    this.element = h("div", {}, h("div", { class: "choices" }, this.buttons), this.body);
    this.shown = null;
  }

  async show(query, layer, head) {
    this.buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === query)));
    const key = [query, layer, head].join();
    if (key === this.shown) return;
    this.shown = key;
    if (query === null) {
      fill(this.body, h("p", { class: "hint" }, "Choose one of these tokens to see what it read, and which part of the text its prediction came from."));
      return;
    }
    const strongest = await this.side.strongest(query, STRONGEST);
    if (key !== this.shown) return;
    fill(this.body, this.prediction(query), this.mattered(query, strongest, layer, head));
  }

  prediction(query) {
    const { at, candidates } = this.side.queries[query];
    const before = this.side.pieces.slice(Math.max(0, at - CONTEXT + 1), at).join("");
    const next = this.side.pieces[at + 1];
    const rows = candidates.map(({ text, p }, i) =>
      h("tr", {},
        h("th", { scope: "row" }, quoted(text)),
        h("td", {}, probability(p), bar(p, "read")),
        h("td", { class: "note" }, [i === 0 && "likeliest", text === next && "came next"].filter(Boolean).join(", "))));
    return h("section", {},
      h("h4", {}, "What it expects next"),
      h("p", { class: "context" }, `… ${visible(before.slice(-90))}`, h("mark", {}, visible(this.side.pieces[at]))),
      h("table", { class: "expected" }, h("tbody", {}, rows)));
  }

  mattered(query, { shown, tried }, layer, head) {
    const { candidates } = this.side.queries[query];
    const first = candidates[0];
    const rows = shown.map((one) =>
      h("tr", { class: one.layer === layer && one.head === head ? "picked" : undefined },
        h("td", {}, h("button", { type: "button", class: "plain", onclick: () => this.onState(one) },
          `layer ${this.side.layers[one.layer].layer}, head ${one.head}`)),
        h("td", {}, `${one.span.start} – ${one.span.end - 1}`),
        h("td", { class: "text" }, excerptOf(this.side, one.span, 34)),
        h("td", {}, `${probability(first.p)} → ${probability(one.p[0])}`),
        h("td", {}, one.kl.toFixed(3), bar(shown[0].kl ? one.kl / shown[0].kl : 0, "read"))));
    if (!rows.length) {
      const why = this.side.has(query) ? "There was no choice of states to leave out." : "What this token read did not fit into the page (see its end).";
      return h("section", {}, h("h4", {}, "Which states mattered"), h("p", {}, why));
    }
    const heads = ["Where", "Tokens", "Text", `${quoted(first.text)} without it`, "Change, bits"];
    return h("section", {},
      h("h4", {}, "Which states mattered most, over all layers and heads"),
      h("div", { class: "wide" }, h("table", {},
        h("thead", {}, h("tr", {}, heads.map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, rows))),
      h("p", { class: "caption" },
        `Each of ${tried} states was left out by itself: taken out of the read of this one token in its own layer and head. `,
        "Everything above that layer was computed anew; what earlier tokens stored stayed. The change is the Kullback–Leibler ",
        `divergence from the prediction with all states. Tried are the ${this.mostLeftOut} states of a layer with the largest parts of the read.`));
  }
}

// The one line above the text when it is coloured by a read.
export function readSentence(side, query, colour) {
  const name = quoted(side.pieces[side.queries[query].at]);
  return colour === "read"
    ? `The darker, the larger the share of its state in what ${name} read in this layer and head.`
    : `The darker, the more the prediction at ${name} changes when the state is left out of this head's read.`;
}
