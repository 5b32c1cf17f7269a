// The page: its state, and who shows it.

import { Controls } from "./controls.js";
import { fill, h } from "./dom.js";
import { SideView } from "./side.js";
import { openStore } from "./store.js";
import { count, plural } from "./words.js";

const KEYS = [["[ and ]", "layer before and after"], [", and .", "head before and after"], ["space", "replay, and pause"], ["← and →", "on the slider or the text: one token back and forth"], ["/", "find text"], ["Escape", "leave the query"]];

class App {
  constructor(store, root) {
    this.store = store;
    const [first] = store.sides;
    this.state = { layer: startLayer(first), head: 0, t: first.length - 1, query: null, colour: "states", found: null };
    const change = (changes) => this.change(changes);
    change.map = (token, from, to) => this.map(token, from, to);
    this.controls = new Controls(first, { onChange: change, onFound: (found) => this.change({ found }, true) });
    this.views = store.sides.map((side) => new SideView(side, store, { change, several: store.sides.length > 1 }));
    this.drawn = null;
    fill(root, this.header(), this.controls.element,
      h("div", { class: `sides${this.views.length > 1 ? " two" : ""}` }, this.views.map((view) => view.element)), this.footer());
    document.addEventListener("keydown", (event) => this.key(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.change({}));
  }

  header() {
    const [first] = this.store.sides;
    const names = this.store.sides.map((side) => side.name).join(" and ");
    return h("header", {},
      h("h1", {}, "What the memory did with this text"),
      h("p", { class: "lead" },
        h("b", {}, names), ` read ${plural(first.length, "token")}. Each head of each layer keeps the past as a short list of `,
        h("b", {}, "states"), ", each of them the sum of one stretch of the text. When something new comes, a state opens; when the list is full, two neighbours become one. ",
        "Choose a layer and a head, and move the time to watch."));
  }

  footer() {
    const { leftOut, sides } = this.store;
    const notes = [...leftOut, ...sides.flatMap((side) => side.notes)];
    return h("footer", {},
      notes.length ? h("section", { id: "left-out" }, h("h3", {}, "What to know about this page"), h("ul", {}, notes.map((note) => h("li", {}, note)))) : h("p", { id: "left-out" }, "Nothing is left out of this page."),
      h("details", {}, h("summary", {}, "Keys"), h("dl", {}, KEYS.map(([key, does]) => [h("dt", {}, key), h("dd", {}, does)]))));
  }

  // The token of another reading where the text is as far.
  map(token, from, to) {
    const { sides } = this.store;
    return from === to ? token : sides[to].tokenAt(Math.max(0, sides[from].ends[token] - 1));
  }

  change(changes, reveal = false) {
    const { own, side, by, ...plain } = changes;
    if (own !== undefined) plain.t = this.map(own, side, 0);
    if (by) plain.t = this.controls.inside(this.state.t + by);
    delete plain.side;
    const before = this.state;
    this.state = { ...before, ...plain };
    const heads = this.store.sides[0].layers[this.state.layer].rates.length;
    this.state.head = Math.min(this.state.head, heads - 1);
    if (this.state.query === null && before.query !== null) this.state.colour = "states";
    if (changes.query !== undefined && changes.query !== null) {
      if (changes.colour === undefined) this.state.colour = "read";
      this.controls.toggle(false);
      reveal = true;
    }
    this.reveal ||= reveal;
    this.controls.show(this.state);
    if (this.drawn === null) this.drawn = requestAnimationFrame(() => this.draw());
  }

  async draw() {
    this.drawn = null;
    const { state, reveal } = this;
    const current = () => state === this.state;
    for (const view of this.views) {
      const head = view.side.ready(state.layer, state.head) ?? (await view.side.head(state.layer, state.head));
      if (!current()) return;
      const t = this.map(state.t, 0, view.side.number);
      await view.show(state, head, t, current);
      if (!current()) return;
      if (reveal) view.text.reveal(state.found ? view.mapped(state.found)[0] : t);
    }
    this.reveal = false;
    const [first] = this.views;
    this.controls.say(state.found ? first.holder(state.found) : "");
    document.documentElement.dataset.shown = `${state.layer} ${state.head} ${state.t} ${state.query}`;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") {
      this.change({ query: null, colour: "states", found: null });
      return;
    }
    if (event.target.closest("input, select, button, summary") && event.key !== "Escape") return;
    const acts = {
      "[": () => this.controls.move("layer", -1), "]": () => this.controls.move("layer", 1),
      ",": () => this.controls.move("head", -1), ".": () => this.controls.move("head", 1),
      " ": () => this.controls.toggle(), "/": () => this.controls.search.focus(),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }
}

// The layer in the middle: the first ones of a model mostly look at single tokens.
function startLayer(side) {
  return Math.floor(side.layers.length / 2);
}

function start() {
  const root = document.getElementById("page");
  try {
    const app = new App(openStore(document), root);
    app.change({}, true);
  } catch (error) {
    fill(root, h("p", {}, `This page could not be drawn: ${error.message}`));
    throw error;
  }
}

start();
