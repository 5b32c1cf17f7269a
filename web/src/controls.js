// The bar at the top: layer, head, time and search.

import { choices, fill, h } from "./dom.js";
import { occurrences } from "./search.js";
import { count } from "./words.js";

const TICK = 60; // milliseconds between steps of a replay
const REPLAY = 300; // steps that a whole replay has at most

export class Controls {
  constructor(side, { onChange, onFound }) {
    this.side = side;
    this.onChange = onChange;
    this.onFound = onFound;
    this.found = [];
    this.place = -1;
    this.timer = null;
    this.layer = h("select", { id: "layer", onchange: () => onChange({ layer: Number(this.layer.value) }) });
    this.head = h("select", { id: "head", onchange: () => onChange({ head: Number(this.head.value) }) });
    this.time = h("input", { type: "range", id: "time", min: "0", max: String(side.length - 1), step: "1", oninput: () => onChange({ t: Number(this.time.value) }) });
    this.number = h("input", { type: "number", id: "at", min: "0", max: String(side.length - 1), "aria-label": "after token", onchange: () => onChange({ t: this.inside(Number(this.number.value)) }) });
    this.play = h("button", { type: "button", id: "play", "aria-pressed": "false", onclick: () => this.toggle() }, "▶ replay");
    this.search = h("input", { type: "search", id: "search", placeholder: "find text", "aria-label": "find text", oninput: () => this.find(), onkeydown: (event) => this.searchKey(event) });
    this.said = h("span", { class: "said", role: "status" });
    choices(this.layer, side.layers.map((one) => `${one.layer}`), 0);
    this.element = h("form", { class: "bar-top", onsubmit: (event) => event.preventDefault() },
      h("div", { class: "group" },
        h("label", { for: "layer" }, "Layer"), step("previous layer", "‹", () => this.move("layer", -1)), this.layer, step("next layer", "›", () => this.move("layer", 1)),
        h("label", { for: "head" }, "Head"), step("previous head", "‹", () => this.move("head", -1)), this.head, step("next head", "›", () => this.move("head", 1))),
      h("div", { class: "group time" },
        this.play, h("label", { for: "time" }, "After token"), this.number, this.time, h("span", { class: "of" }, `of ${count(side.length)}`)),
      h("div", { class: "group" },
        this.search, step("previous match", "‹", () => this.go(-1)), step("next match", "›", () => this.go(1)), this.said));
  }

  show(state) {
    this.state = state;
    const heads = this.side.layers[state.layer].rates.length;
    if (this.head.length !== heads) choices(this.head, Array.from({ length: heads }, (_, i) => String(i)), state.head);
    this.layer.value = String(state.layer);
    this.head.value = String(state.head);
    this.time.value = String(state.t);
    this.number.value = String(state.t);
  }

  inside(t) {
    return Math.max(0, Math.min(this.side.length - 1, Math.round(t) || 0));
  }

  move(what, by) {
    const size = what === "layer" ? this.side.layers.length : this.side.layers[this.state.layer].rates.length;
    this.onChange({ [what]: (this.state[what] + by + size) % size });
  }

  toggle(on = this.timer === null) {
    if (this.timer !== null) clearInterval(this.timer);
    this.timer = null;
    this.play.setAttribute("aria-pressed", String(on));
    fill(this.play, on ? "❚❚ pause" : "▶ replay");
    if (!on) return;
    const last = this.side.length - 1;
    const by = Math.max(1, Math.round(last / REPLAY));
    if (this.state.t >= last) this.onChange({ t: 0 });
    this.timer = setInterval(() => {
      const t = Math.min(last, this.state.t + by);
      this.onChange({ t });
      if (t === last) this.toggle(false);
    }, TICK);
  }

  find() {
    this.found = occurrences(this.side.text, this.search.value).map(([a, b]) => [this.side.tokenAt(a), this.side.tokenAt(b)]);
    this.place = -1;
    if (this.found.length) this.go(1);
    else this.onFound(null);
  }

  go(by) {
    if (!this.found.length) return;
    this.place = (this.place + by + this.found.length) % this.found.length;
    this.onFound(this.found[this.place]);
  }

  searchKey(event) {
    if (event.key === "Enter") {
      event.preventDefault();
      this.go(event.shiftKey ? -1 : 1);
    }
  }

  // What is said of the match: which state holds it.
  say(sentence) {
    if (!this.search.value) this.said.textContent = "";
    else if (!this.found.length) this.said.textContent = "not in the text";
    else this.said.textContent = `${this.place + 1} of ${this.found.length}: ${sentence}`;
  }
}

function step(label, text, act) {
  return h("button", { type: "button", class: "step", "aria-label": label, onclick: act }, text);
}
