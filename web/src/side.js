// All that is shown of one reading.

import { fill, h } from "./dom.js";
import { spanOf } from "./lifetimes.js";
import { QueryPanel, readSentence } from "./query.js";
import { StatesTable } from "./states.js";
import { TextView, tokenSentence } from "./text.js";
import { Timeline } from "./timeline.js";
import { Bounds, HeadsMap, LayersTable, statesSentence } from "./totals.js";
import { count, probability, quoted, ruleSentence } from "./words.js";

const COLOURINGS = { states: "by state", read: "by what the query read", effect: "by effect of leaving out" };

export class SideView {
  constructor(side, about, { change, several }) {
    this.side = side;
    this.change = change;
    const onTime = (t) => change({ [side.number ? "own" : "t"]: t, side: side.number });
    this.text = new TextView(side, { onToken: (t) => this.chose(t) });
    this.timeline = new Timeline(side, { onTime });
    this.states = new StatesTable(side, { onPick: (span) => this.pick(span) });
    this.layers = new LayersTable(side, { onLayer: (layer) => change({ layer }) });
    this.map = new HeadsMap(side, { onHead: (layer, head) => change({ layer, head }) });
    this.bounds = new Bounds(side, about.partitions, about.meaning);
    this.query = side.queries.length
      ? new QueryPanel(side, { onQuery: (query) => change({ query, t: this.timeFor(query) }), onState: (one) => this.goTo(one) }, about.mostLeftOut)
      : null;
    this.colour = h("select", { "aria-label": "what colours the text", onchange: () => change({ colour: this.colour.value }) },
      Object.entries(COLOURINGS).map(([value, text]) => h("option", { value }, text)));
    this.rule = h("p", { class: "rule" });
    this.legend = h("div", { class: "legend" });
    this.token = h("p", { class: "token", role: "status" });
    this.counted = h("h3", {});
    this.about = caption("");
    this.element = h("article", { class: several ? "side half" : "side" }, this.parts(several));
    this.picked = null;
    this.text.element.addEventListener("keydown", (event) => this.key(event));
  }

  parts(several) {
    const { side } = this;
    const none = "No token of this reading was chosen as a query when the page was made.";
    return [
      several ? h("h2", {}, side.name) : null,
      this.rule,
      h("div", { class: "cards" },
        card("text", "The text", this.colour, this.legend, this.text.element, this.token),
        card("table", this.counted, null,
          this.about,
          this.states.element, this.states.line),
        card("query", "What a token read", null, this.query ? this.query.element : h("p", { class: "hint" }, none)),
        card("time", "Scores and lifetimes", null,
          caption("Above: how new each token is to the current state. Orange tokens reach τ and open a state. Below: every state from its birth to the merge that ends it; pale is after the chosen time. Click to choose a time; ▼ are queries."),
          this.timeline.element),
        card("layers", "Layers", null,
          caption("Opened: share of tokens that opened a state. W: how many dense states a read touches. KV cache: what a Transformer of the same width would hold, in bfloat16."),
          this.layers.element),
        card("heads", "Heads", null,
          caption("Every head of every layer, the darker the more often it opened a state (layers from top to bottom). Click to choose one."),
          this.map.element),
        card("bound", "How mixed the states are: Theorem 1's bound", null, this.bounds.element)),
    ];
  }

  // Show the page's state; head: the decoded head that it names; current: whether it still is the page's state.
  async show(state, head, t, current) {
    const [layer, h1] = this.side.clamp(state.layer, state.head);
    const spans = head.lives.spans(t);
    const query = this.side.queries[state.query] && this.side.queries[state.query].at === t ? state.query : null;
    const rows = query === null ? null : await this.side.readOf(query, layer, h1);
    if (!current()) return;
    const reads = rows && new Map(rows.map((row) => [row.start, row]));
    const found = state.found && this.mapped(state.found);
    if (this.picked !== null && !spans.some((span) => span.start === this.picked)) this.picked = null;
    const colour = reads ? state.colour : "states";
    this.colour.value = colour;
    for (const option of this.colour.options) option.disabled = option.value !== "states" && !reads;
    const picture = {
      spans, lives: head.lives, t, colour, weights: weightsOf(reads, colour), picked: this.picked, found, head,
      layer: this.side.layers[layer], name: `layer ${this.side.layers[layer].layer}, head ${h1}`,
      queries: new Set(this.side.queries.map((one) => one.at)), query: query === null ? null : t,
    };
    this.spans = spans;
    this.picture = picture;
    fill(this.rule, ruleSentence(this.side.layers[layer]));
    this.counted.textContent = statesSentence(spans, t);
    this.about.textContent = tableSentence(this.side, query);
    this.text.show(picture);
    this.timeline.show(picture);
    this.states.show({ ...picture, reads, candidates: query === null ? [] : this.side.queries[query].candidates });
    this.layers.show(layer);
    this.map.show(layer, h1);
    this.bounds.show(layer, h1);
    this.drawLegend(colour, query);
    this.token.textContent = tokenSentence(this.side, head, spans, this.looked ?? t, t);
    if (this.query) await this.query.show(query, layer, h1);
  }

  drawLegend(colour, query) {
    if (colour === "states") {
      fill(this.legend, h("span", { class: "key c0 first" }, "one state"), h("span", { class: "key c2 first" }, "the next"),
        h("span", { class: "key ahead" }, "not read yet"), h("span", { class: "key now" }, "the latest token"),
        this.side.queries.length ? h("span", { class: "key query" }, "a query: click it") : null);
    } else {
      const ramp = [0.1, 0.4, 0.7, 1].map((w) => {
        const square = h("span", { class: `key by-${colour}` }, " ");
        square.style.setProperty("--w", String(w));
        return square;
      });
      fill(this.legend, ramp, h("span", {}, readSentence(this.side, query, colour)));
    }
  }

  // Which state holds what was found, in words.
  holder(found) {
    const [first, last] = this.mapped(found);
    const one = (token) => spanOf(this.spans, token);
    if (!one(first)) return "not read yet";
    const names = [...new Set([one(first), one(last)].filter(Boolean))];
    return names.map((span) => `state ${this.spans.indexOf(span) + 1} (tokens ${count(span.start)} to ${count(span.end - 1)})`).join(" and ");
  }

  mapped(found) {
    return this.side.number ? found.map((token) => this.change.map(token, 0, this.side.number)) : found;
  }

  timeFor(query) {
    const { at } = this.side.queries[query];
    return this.side.number ? this.change.map(at, this.side.number, 0) : at;
  }

  chose(token) {
    this.looked = token;
    const query = this.side.queries.findIndex((one) => one.at === token);
    if (query >= 0) this.change({ query, t: this.timeFor(query), colour: "read" });
    else {
      this.picked = spanOf(this.spans, token)?.start ?? null;
      this.change({});
    }
  }

  pick(span) {
    this.picked = this.picked === span.start ? null : span.start;
    this.looked = span.start;
    this.change({});
    if (this.picked !== null) this.text.reveal(span.start);
  }

  goTo({ layer, head, span }) {
    this.picked = span.start;
    this.looked = span.start;
    this.change({ layer, head });
    this.text.reveal(Math.max(span.start, span.end - 40));
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    this.change({ by });
  }
}

// What the table's columns are.
function tableSentence(side, query) {
  if (query === null) return "Every row is one state: a matrix that sums up one stretch of the text. A read is a weighted sum over these rows. Choose one to see it in the text.";
  const { at, candidates } = side.queries[query];
  return `How ${quoted(side.pieces[at])} read these states. λ: what a state counts for. If left out: how far the prediction moves, in bits, and ` +
    `how likely ${quoted(candidates[0].text)} is then (with all states: ${probability(candidates[0].p)}).`;
}

function weightsOf(reads, colour) {
  const weights = new Map();
  if (!reads) return weights;
  const value = (row) => (colour === "effect" ? (row.effect ? row.effect.kl : 0) : (row.share ?? row.lam));
  const largest = Math.max(...[...reads.values()].map(value), 1e-12);
  for (const [start, row] of reads) weights.set(start, value(row) / largest);
  return weights;
}

function card(name, title, tool, ...content) {
  const heading = typeof title === "string" ? h("h3", {}, title) : title;
  return h("section", { class: `card in-${name}` }, h("div", { class: "card-head" }, heading, tool), content);
}

function caption(text) {
  return h("p", { class: "caption" }, text);
}
