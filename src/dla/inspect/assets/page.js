// Made of web/src by web/bundle.mjs: change it there.
(() => {
"use strict";

// dom.js

// Elements made of values: a text becomes a text node, never markup.

function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
}

// A bar as wide as a share of its cell.
function bar(share, kind) {
  const inner = h("span", { class: `bar ${kind}`, "aria-hidden": "true" });
  inner.style.setProperty("--share", String(Math.min(1, Math.max(0, share))));
  return inner;
}

function choices(select, names, chosen) {
  fill(select, names.map((name, i) => h("option", { value: String(i), selected: i === chosen }, name)));
}

// search.js

// Finds text, whatever its case.

const MOST_FOUND = 10_000;

// Places (first and last character) of a text inside another, from left to right.
function occurrences(text, wanted) {
  const found = [];
  if (!wanted) return found;
  const [haystack, needle] = fold(text, wanted);
  for (let at = haystack.indexOf(needle); at >= 0 && found.length < MOST_FOUND; at = haystack.indexOf(needle, at + 1)) {
    found.push([at, at + needle.length - 1]);
  }
  return found;
}

// Lower case where that keeps every character in its place.
function fold(...texts) {
  const lower = texts.map((text) => text.toLowerCase());
  return lower.every((text, i) => text.length === texts[i].length) ? lower : texts;
}

// words.js

// Numbers and pieces of text for people.

function count(value) {
  return Math.round(value).toLocaleString("en");
}

function percent(share, digits = 0) {
  return `${(100 * share).toFixed(digits)}%`;
}

function probability(p) {
  if (p > 0 && p < 0.0005) return "under 0.1%";
  return percent(p, 1);
}

function bytes(value) {
  let size = value;
  for (const unit of ["B", "KiB", "MiB"]) {
    if (size < 1024) return `${Number(size.toPrecision(3))} ${unit}`;
    size /= 1024;
  }
  return `${Number(size.toPrecision(3))} GiB`;
}

function few(value) {
  return Number(value.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 3 });
}

function plural(n, what) {
  return `${count(n)} ${what}${n === 1 ? "" : "s"}`;
}

// Line breaks and tabs as signs, so that a token that is nothing else can be seen.
function visible(text) {
  return text.replace(/\r/g, "␍").replace(/\n/g, "⏎").replace(/\t/g, "⇥");
}

// The beginning and the end of a text, on one line, in `room` characters.
function excerpt(text, room) {
  const line = visible(text);
  if (line.length <= room) return line;
  const half = Math.floor((room - 3) / 2);
  return `${line.slice(0, half)} … ${line.slice(-half)}`;
}

function quoted(text) {
  return `“${visible(text)}”`;
}

// What a layer's memory does, in one sentence.
function ruleSentence(layer) {
  if (layer.kind === "single") return "One state holds everything.";
  if (layer.kind === "levels") return "Blocks are cut by position: sizes are powers of two, and equal neighbours are joined.";
  const { tau, capacity, merge, score, block } = layer.rules;
  const opens = block
    ? `Every ${count(block)} tokens a new state opens`
    : `A token whose score (${score === "state" ? "how far it would move the current state" : "its distance from the current state"}, 0 to 2) is at least τ = ${tau} opens a new state; any other joins the current one`;
  const pair = {
    density: "with the least information per token",
    similarity: "that point most nearly the same way",
    ward: "whose union loses the least",
  }[merge];
  return capacity === null
    ? `${opens}. States are never merged.`
    : `${opens}. With ${capacity} states alive, the two neighbours ${pair} are merged first (${merge}).`;
}

// controls.js

// The bar at the top: layer, head, time and search.


const TICK = 60; // milliseconds between steps of a replay
const REPLAY = 300; // steps that a whole replay has at most

class Controls {
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

// lifetimes.js

// A memory's history as lifetimes: a start lives from p to its death, and the states after step t are the gaps between
// the starts alive then.

const ALIVE = 2 ** 31 - 1;
const COLOURS = 8;

// Deaths of starts whose merges are known, each in the order in which they opened.
function deathsOf(starts, merged) {
  const deaths = new Int32Array(starts.length).fill(ALIVE);
  const living = [];
  for (let i = 0; i < starts.length; i++) {
    if (merged[i] >= 0) deaths[living.splice(merged[i] + 1, 1)[0]] = starts[i];
    living.push(i);
  }
  return deaths;
}

// Log-Linear's blocks: a start p ends its lowest set bit later, and 0 never.
function levelLifetimes(length) {
  const starts = Int32Array.from({ length }, (_, p) => p);
  const deaths = starts.map((p) => {
    const death = p + (p & -p);
    return p === 0 || death >= length ? ALIVE : death;
  });
  return { starts, deaths };
}

class Lifetimes {
  constructor(starts, deaths, length) {
    this.starts = starts;
    this.deaths = deaths;
    this.length = length;
    this.lanes = new Int32Array(starts.length);
    this.colours = new Uint8Array(starts.length);
    this.absorber = new Int32Array(starts.length).fill(-1); // the start that took it in, as an index
    this.laneCount = this.layOut();
  }

  // How many starts are at most t.
  before(t) {
    let low = 0;
    let high = this.starts.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.starts[middle] <= t) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // The states alive after step t, oldest first; the end of a span is exclusive, index that of its start.
  spans(t) {
    const alive = [];
    const count = this.before(t);
    for (let i = 0; i < count; i++) {
      if (this.deaths[i] > t) alive.push({ start: this.starts[i], end: t + 1, index: i });
    }
    for (let i = 0; i + 1 < alive.length; i++) alive[i].end = alive[i + 1].start;
    return alive;
  }

  // The starts that the state of a span has taken in, its own first.
  mergedFrom(span) {
    const found = [];
    for (let i = span.index; i < this.starts.length && this.starts[i] < span.end; i++) found.push(this.starts[i]);
    return found;
  }

  opens(t) {
    const i = this.before(t) - 1;
    return i >= 0 && this.starts[i] === t;
  }

  // A lane for every start, free for as long as it lives, and a colour that its neighbours do not have when it opens.
  layOut() {
    const living = []; // indices, oldest first
    const free = [];
    const lastUse = new Array(COLOURS).fill(-1);
    const byDeath = [...this.deaths.keys()].filter((i) => this.deaths[i] < ALIVE).sort((a, b) => this.deaths[a] - this.deaths[b]);
    let next = 0;
    let lanes = 0;
    for (let i = 0; i < this.starts.length; i++) {
      for (; next < byDeath.length && this.deaths[byDeath[next]] <= this.starts[i]; next++) {
        const dead = byDeath[next];
        const place = living.indexOf(dead);
        this.absorber[dead] = living[place - 1] ?? -1;
        living.splice(place, 1);
        free.push(this.lanes[dead]);
      }
      free.sort((a, b) => b - a);
      this.lanes[i] = free.length ? free.pop() : lanes++;
      const taken = living.slice(-3).map((j) => this.colours[j]);
      let best = 0;
      let oldest = Infinity;
      for (let c = 0; c < COLOURS; c++) {
        if (!taken.includes(c) && lastUse[c] < oldest) [best, oldest] = [c, lastUse[c]];
      }
      this.colours[i] = best;
      lastUse[best] = i;
      living.push(i);
    }
    return lanes;
  }
}

// The span that holds a token, by a binary search; undefined if it is not read yet.
function spanOf(spans, token) {
  let low = 0;
  let high = spans.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (spans[middle].start <= token) low = middle;
    else high = middle - 1;
  }
  const span = spans[low];
  return span && token >= span.start && token < span.end ? span : undefined;
}

// packed.js

// Blocks of numbers as src/dla/inspect/packed.py makes them: base64 of raw DEFLATE.

const NOTHING = "-";
const TOP_SCORE = 2;

async function unblock(text) {
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function leb128(bytes) {
  const numbers = [];
  let value = 0;
  let scale = 1;
  for (const byte of bytes) {
    value += (byte & 127) * scale;
    if (byte < 128) {
      numbers.push(value);
      value = 0;
      scale = 1;
    } else {
      scale *= 128;
    }
  }
  return numbers;
}

// Starts, and what was merged when each of them opened: the lower index of the pair, -1 for nothing.
function startsAndMerges(bytes) {
  const numbers = leb128(bytes);
  const count = numbers[0];
  const starts = new Int32Array(count);
  const merged = new Int32Array(count);
  let at = 0;
  for (let i = 0; i < count; i++) {
    at += numbers[1 + i];
    starts[i] = at;
    merged[i] = numbers[1 + count + i] - 1;
  }
  return { starts, merged };
}

// The score of every token.
function unpackScores(bytes, bits, length) {
  const step = TOP_SCORE / (2 ** bits - 1);
  const scores = new Float64Array(length);
  for (let t = 0; t < length; t++) {
    let whole;
    if (bits === 4) whole = t % 2 ? bytes[t >> 1] & 15 : bytes[t >> 1] >> 4;
    else if (bits === 8) whole = bytes[t];
    else whole = bytes[2 * t] | (bytes[2 * t + 1] << 8);
    scores[t] = whole * step;
  }
  return scores;
}

// Fixed-point numbers of 16 bits.
function unpackFixed(bytes, largest) {
  const numbers = new Float64Array(bytes.length / 2);
  for (let i = 0; i < numbers.length; i++) numbers[i] = ((bytes[2 * i] | (bytes[2 * i + 1] << 8)) / 65535) * largest;
  return numbers;
}

// Rows of head, state, KL and probabilities.
function unpackEffects(bytes, candidates) {
  const numbers = new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength));
  const rows = [];
  for (let i = 0; i < numbers.length; i += 3 + candidates) {
    const [head, state, kl, ...p] = numbers.subarray(i, i + 3 + candidates);
    rows.push({ head, state, kl, p });
  }
  return rows;
}

// store.js

// The page's data: what is small is read at once, a head's blocks when they are asked for, and the latest ones are kept.


const KEPT = 32; // heads

class Side {
  constructor(number, about, first, bits, find) {
    Object.assign(this, about);
    this.number = number;
    this.bits = bits;
    this.find = find; // the text of a data element, null if it is not there
    this.pieces = about.pieces ?? first.pieces;
    this.ends = new Int32Array(this.length); // characters up to each token's end
    let end = 0;
    this.pieces.forEach((piece, t) => (this.ends[t] = end += piece.length));
    this.heads = new Map();
    this.reads = new Map();
    this.blocks = new Map();
  }

  get text() {
    return (this.joined ??= this.pieces.join(""));
  }

  textOf(span) {
    return this.pieces.slice(span.start, span.end).join("");
  }

  // The token that has the character at this place of the text.
  tokenAt(character) {
    let low = 0;
    let high = this.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] > character) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  clamp(layer, head) {
    const own = Math.min(layer, this.layers.length - 1);
    return [own, Math.min(head, this.layers[own].rates.length - 1)];
  }

  // A head's lifetimes and scores, if they are here already.
  ready(layer, head) {
    return this.heads.get(this.clamp(layer, head).join());
  }

  async head(layer, head) {
    const [l, i] = this.clamp(layer, head);
    const key = [l, i].join();
    if (!this.heads.has(key)) {
      const made = await this.decode(l, i);
      this.heads.set(key, made);
      if (this.heads.size > KEPT) this.heads.delete(this.heads.keys().next().value);
    }
    return this.heads.get(key);
  }

  async decode(layer, head) {
    const [life, score] = this.blocksOf(`layer-${this.number}-${layer}`).slice(2 * head, 2 * head + 2);
    let lives = { starts: Int32Array.of(0), deaths: Int32Array.of(ALIVE) };
    if (this.layers[layer].kind === "levels") lives = levelLifetimes(this.length);
    if (life !== NOTHING) {
      const { starts, merged } = startsAndMerges(await unblock(life));
      lives = { starts, deaths: deathsOf(starts, merged) };
    }
    const scores = score === NOTHING ? null : unpackScores(await unblock(score), this.bits, this.length);
    return { lives: new Lifetimes(lives.starts, lives.deaths, this.length), scores, sums: scores && running(scores) };
  }

  // Whether the page has what a query read.
  has(query) {
    return this.blocksOf(`query-${this.number}-${query}`) !== null;
  }

  // What a query read in a layer, by head: lam, share and effects by state. null: the page does not have it.
  async read(query, layer) {
    const key = [query, layer].join();
    if (!this.reads.has(key)) this.reads.set(key, await this.decodeRead(query, layer));
    return this.reads.get(key);
  }

  async decodeRead(query, layer) {
    const about = this.queries[query];
    const place = about ? about.layers.indexOf(layer) : -1;
    const blocks = place < 0 ? null : this.blocksOf(`query-${this.number}-${query}`);
    if (!blocks) return null;
    const [lam, share, effects] = blocks.slice(3 * place, 3 * place + 3);
    return {
      lam: unpackFixed(await unblock(lam), about.largest[place]),
      share: share === NOTHING ? null : unpackFixed(await unblock(share), 1),
      effects: effects === NOTHING ? [] : unpackEffects(await unblock(effects), about.candidates.length),
    };
  }

  // The states of a head that a query read, with lam, share and effect.
  async readOf(query, layer, head) {
    const [l, i] = this.clamp(layer, head);
    const read = await this.read(query, l);
    if (!read) return null;
    let first = 0;
    for (let before = 0; before < i; before++) first += (await this.head(l, before)).lives.spans(this.queries[query].at).length;
    const spans = (await this.head(l, i)).lives.spans(this.queries[query].at);
    return spans.map((span, state) => ({
      ...span,
      lam: read.lam[first + state],
      share: read.share ? read.share[first + state] : null,
      effect: read.effects.find((one) => one.head === i && one.state === state) ?? null,
    }));
  }

  // The states of all layers and heads without which the prediction changes most.
  async strongest(query, most) {
    const found = [];
    for (const layer of this.queries[query].layers) {
      const read = await this.read(query, layer);
      for (const effect of read ? read.effects : []) found.push({ layer, ...effect });
    }
    found.sort((a, b) => b.kl - a.kl);
    const shown = found.slice(0, most);
    for (const one of shown) {
      one.span = (await this.head(one.layer, one.head)).lives.spans(this.queries[query].at)[one.state];
    }
    return { shown, tried: found.length };
  }

  blocksOf(name) {
    if (!this.blocks.has(name)) {
      const text = this.find(name);
      this.blocks.set(name, text === null ? null : text.trim().split(" "));
      if (this.blocks.size > KEPT) this.blocks.delete(this.blocks.keys().next().value);
    }
    return this.blocks.get(name);
  }
}

function running(scores) {
  const sums = new Float64Array(scores.length + 1);
  for (let t = 0; t < scores.length; t++) sums[t + 1] = sums[t] + scores[t];
  return sums;
}

function information(head, span) {
  return head.sums ? head.sums[span.end] - head.sums[span.start] : null;
}

// The data elements of a document.
function openStore(document) {
  const about = JSON.parse(document.getElementById("about").textContent);
  const find = (name) => document.getElementById(name)?.textContent ?? null;
  const sides = [];
  about.sides.forEach((one, i) => sides.push(new Side(i, one, sides[0], about.bits, find)));
  return { ...about, sides };
}

// states.js

// The table of the states at the chosen time.


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

class StatesTable {
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
function excerptOf(side, span, room) {
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

// query.js

// What a query token read: the prediction, and which states moved it.


const STRONGEST = 8;
const CONTEXT = 24; // tokens before the query that are shown

class QueryPanel {
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
function readSentence(side, query, colour) {
  const name = quoted(side.pieces[side.queries[query].at]);
  return colour === "read"
    ? `The darker, the larger the share of its state in what ${name} read in this layer and head.`
    : `The darker, the more the prediction at ${name} changes when the state is left out of this head's read.`;
}

// text.js

// The text, token by token, coloured by what the memory does with it. All of it stands in the page as plain text, in
// blocks; a block's tokens become elements when it comes near the window, and are painted when they are seen.


const BLOCK = 256; // tokens

class TextView {
  constructor(side, { onToken }) {
    this.side = side;
    this.element = h("div", {
      class: "story",
      tabindex: "0",
      role: "group",
      "aria-label": "the text; arrow keys move the chosen time",
    });
    this.blocks = [];
    this.seen = new Set();
    this.picture = null;
    for (let from = 0; from < side.length; from += BLOCK) {
      const to = Math.min(side.length, from + BLOCK);
      const element = h("span", { class: "block" }, side.pieces.slice(from, to).map(shown).join(""));
      this.blocks.push({ element, from, to, tokens: null, painted: null });
    }
    this.element.append(...this.blocks.map((block) => block.element));
    this.element.addEventListener("click", (event) => {
      const token = event.target.closest("[data-t]");
      if (token) onToken(Number(token.dataset.t));
    });
    this.observer = new IntersectionObserver((entries) => this.noticed(entries), {
      root: this.element,
      rootMargin: "300px 0px",
    });
    for (const block of this.blocks) this.observer.observe(block.element);
  }

  noticed(entries) {
    for (const entry of entries) {
      const block = this.blocks.find((one) => one.element === entry.target);
      if (entry.isIntersecting) this.seen.add(block);
      else this.seen.delete(block);
    }
    this.paint();
  }

  show(picture) {
    this.picture = picture;
    this.paint();
  }

  paint() {
    if (!this.picture) return;
    for (const block of this.seen) {
      if (!block.tokens) this.build(block);
      if (block.painted !== this.picture) this.paintBlock(block);
    }
  }

  build(block) {
    block.tokens = [];
    for (let t = block.from; t < block.to; t++) {
      block.tokens.push(h("span", { "data-t": String(t) }, shown(this.side.pieces[t])));
    }
    fill(block.element, block.tokens);
  }

  paintBlock(block) {
    const { spans, lives, t, colour, weights, picked, queries, query, found } = this.picture;
    let span = spanOf(spans, block.from);
    let at = span ? spans.indexOf(span) : spans.length;
    block.tokens.forEach((element, i) => {
      const token = block.from + i;
      while (at < spans.length && token >= spans[at].end) at++;
      span = token <= t ? spans[at] : undefined;
      const names = [];
      if (!span) names.push("ahead");
      else if (colour === "states") names.push(`c${lives.colours[span.index]}`);
      else {
        names.push(`by-${colour}`);
        element.style.setProperty("--w", String(weights.get(span.start) ?? 0));
      }
      if (span && span.start === token) names.push("first");
      if (span && picked !== null && span.start === picked) names.push("picked");
      if (token === t) names.push("now");
      if (queries.has(token)) names.push(token === query ? "query chosen" : "query");
      if (found && token >= found[0] && token <= found[1]) names.push("found");
      const name = names.join(" ");
      if (element.className !== name) element.className = name;
    });
    block.painted = this.picture;
  }

  // Bring a token into the window, if it is not there.
  reveal(token) {
    const block = this.blocks[Math.floor(token / BLOCK)];
    if (!block.tokens) this.build(block);
    if (this.picture) this.paintBlock(block);
    const inside = this.element.getBoundingClientRect();
    const place = block.tokens[token - block.from].getBoundingClientRect();
    if (place.top < inside.top + 24 || place.bottom > inside.bottom - 24) {
      this.element.scrollTop += place.top - inside.top - inside.height / 3;
    }
  }
}

// Line breaks show, and break the line.
function shown(piece) {
  return piece.replace(/\n/g, "⏎\n").replace(/\r/g, "␍");
}

// What to say of a token, beside the text.
function tokenSentence(side, head, spans, token, t) {
  const name = `token ${token}, “${visible(side.pieces[token])}”`;
  const span = token <= t ? spanOf(spans, token) : undefined;
  if (!span) return `${name}: not read yet`;
  const score = head.scores ? `, score ${head.scores[token].toFixed(2)}` : "";
  const opened = head.lives.opens(token) ? ", opened a state" : ", joined the current state";
  return `${name}${score}${opened}; now in state ${spans.indexOf(span) + 1} (tokens ${span.start} to ${span.end - 1})`;
}

// timeline.js

// Scores and lifetimes over time, on a canvas.


const MARGIN = { left: 44, right: 10 };
const SCORES = { top: 22, height: 92 };
const LIVES = { top: 152, height: 250 };
const AXIS = 24;
const SMALLEST = 40; // tokens in the window

class Timeline {
  constructor(side, { onTime }) {
    this.side = side;
    this.canvas = h("canvas", { role: "img" });
    this.range = h("span", { class: "range" });
    this.whole = h("button", { type: "button", onclick: () => this.zoomTo(0, this.side.length) }, "whole text");
    this.element = h(
      "div",
      { class: "timeline" },
      h(
        "div",
        { class: "tools" },
        h("button", { type: "button", "aria-label": "zoom in", onclick: () => this.zoom(0.5) }, "+"),
        h("button", { type: "button", "aria-label": "zoom out", onclick: () => this.zoom(2) }, "−"),
        h("button", { type: "button", "aria-label": "earlier", onclick: () => this.pan(-0.5) }, "◀"),
        h("button", { type: "button", "aria-label": "later", onclick: () => this.pan(0.5) }, "▶"),
        this.whole,
        this.range,
      ),
      this.canvas,
    );
    this.from = 0;
    this.to = Math.min(side.length, window.innerWidth < 620 ? 200 : 600);
    this.picture = null;
    this.canvas.addEventListener("click", (event) => {
      const t = this.tokenAt(event.clientX - this.canvas.getBoundingClientRect().left);
      if (t !== null) onTime(t);
    });
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  show(picture) {
    if (picture.t < this.from || picture.t >= this.to) {
      const width = this.to - this.from;
      this.from = Math.max(0, Math.min(this.side.length - width, picture.t - Math.round(width * 0.8)));
      this.to = this.from + width;
    }
    this.picture = picture;
    this.draw();
  }

  zoom(factor) {
    const width = Math.min(this.side.length, Math.max(Math.min(SMALLEST, this.side.length), Math.round((this.to - this.from) * factor)));
    const centre = this.picture.t >= this.from && this.picture.t < this.to ? this.picture.t : (this.from + this.to) / 2;
    const share = (centre - this.from) / (this.to - this.from);
    this.zoomTo(Math.round(centre - share * width), width);
  }

  pan(share) {
    const width = this.to - this.from;
    this.zoomTo(this.from + Math.round(width * share), width);
  }

  zoomTo(from, width) {
    this.from = Math.max(0, Math.min(this.side.length - width, from));
    this.to = this.from + width;
    this.draw();
  }

  tokenAt(x) {
    const width = this.canvas.clientWidth - MARGIN.left - MARGIN.right;
    const t = Math.floor(this.from + ((x - MARGIN.left) / width) * (this.to - this.from));
    return t >= this.from && t < this.to ? t : null;
  }

  draw() {
    if (!this.picture || !this.canvas.clientWidth) return;
    const { head } = this.picture;
    const scale = window.devicePixelRatio || 1;
    const width = this.canvas.clientWidth;
    const height = this.canvas.clientHeight;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const c = this.canvas.getContext("2d");
    c.setTransform(scale, 0, 0, scale, 0, 0);
    c.font = "12px system-ui, sans-serif";
    const inner = width - MARGIN.left - MARGIN.right;
    const x = (t) => MARGIN.left + ((t - this.from) / (this.to - this.from)) * inner;
    const look = colours();
    this.drawAxis(c, x, look, width, height);
    this.drawScores(c, x, look, width, head);
    this.drawLives(c, x, look, width, head, Math.max(20, height - LIVES.top - AXIS));
    this.drawNow(c, x, look, height);
    this.range.textContent = `tokens ${count(this.from)} to ${count(this.to - 1)} of ${count(this.side.length)}`;
    this.canvas.setAttribute(
      "aria-label",
      `scores and lifetimes of ${this.picture.name}, tokens ${this.from} to ${this.to - 1}; the table below has the states`,
    );
  }

  drawAxis(c, x, look, width, height) {
    const step = niceStep((this.to - this.from) / Math.max(2, width / 110));
    c.fillStyle = look.quiet;
    c.strokeStyle = look.rule;
    c.lineWidth = 1;
    c.textAlign = "center";
    for (let t = Math.ceil(this.from / step) * step; t < this.to; t += step) {
      line(c, x(t), SCORES.top, x(t), height - AXIS + 4);
      if (x(t) < width - 16) c.fillText(count(t), x(t), height - 6);
    }
    for (const { at } of this.side.queries) {
      if (at < this.from || at >= this.to) continue;
      c.fillStyle = look.query;
      const middle = x(at + 0.5);
      c.beginPath();
      c.moveTo(middle - 5, SCORES.top - 8);
      c.lineTo(middle + 5, SCORES.top - 8);
      c.lineTo(middle, SCORES.top);
      c.fill();
    }
  }

  drawScores(c, x, look, width, head) {
    const y = (score) => SCORES.top + SCORES.height * (1 - score / 2);
    c.fillStyle = look.quiet;
    c.textAlign = "right";
    if (!head.scores) {
      c.textAlign = "left";
      const why = this.picture.layer.kind === "dynamic" ? "left out of this page (see the end)" : "none: this memory cuts by position";
      c.fillText(`scores: ${why}`, MARGIN.left + 6, y(1));
      return;
    }
    c.fillText("2", MARGIN.left - 8, y(2) + 4);
    c.fillText("0", MARGIN.left - 8, y(0) + 4);
    const { tau, block } = this.picture.layer.rules;
    if (!block && tau <= 2) {
      c.strokeStyle = look.ink;
      c.setLineDash([5, 4]);
      line(c, MARGIN.left, y(tau), width - MARGIN.right, y(tau));
      c.setLineDash([]);
      c.fillStyle = look.ink;
      c.fillText(`τ ${tau}`, MARGIN.left - 8, y(tau) + 4);
    }
    const each = Math.max(1, x(1) - x(0));
    const size = Math.min(5, Math.max(1.6, each * 0.8));
    for (const opened of [false, true]) {
      for (let t = this.from; t < this.to; t++) {
        if (head.lives.opens(t) !== opened) continue;
        c.globalAlpha = t <= this.picture.t ? 1 : 0.25;
        c.fillStyle = opened ? look.opened : look.joined;
        const tall = opened ? size * 1.5 : size;
        c.fillRect(x(t + 0.5) - size / 2, y(head.scores[t]) - tall / 2, size, tall);
      }
    }
    c.globalAlpha = 1;
  }

  drawLives(c, x, look, width, head, room) {
    const { lives } = head;
    const { t: now, picked } = this.picture;
    const tall = Math.min(12, room / Math.max(1, lives.laneCount));
    const y = (i) => LIVES.top + lives.lanes[i] * tall;
    const thick = Math.max(0.6, tall * 0.7);
    const last = lives.before(this.to - 1);
    c.save();
    c.beginPath();
    c.rect(MARGIN.left, LIVES.top - 4, width - MARGIN.left - MARGIN.right, room + 8);
    c.clip();
    for (let i = 0; i < last; i++) {
      const start = lives.starts[i];
      const death = Math.min(lives.deaths[i], this.side.length);
      if (death < this.from) continue;
      const left = x(start);
      c.fillStyle = look.states[lives.colours[i]];
      const read = Math.min(death, now + 1);
      if (read > start) c.fillRect(left, y(i), Math.max(0.7, x(read) - left), thick);
      if (death > Math.max(read, start)) {
        c.globalAlpha = 0.22;
        c.fillRect(Math.max(left, x(read)), y(i), Math.max(0.7, x(death) - Math.max(left, x(read))), thick);
        c.globalAlpha = 1;
      }
      if (picked === start) {
        c.strokeStyle = look.ink;
        c.lineWidth = 1.5;
        c.strokeRect(left, y(i) - 1, Math.max(2, x(read) - left), thick + 2);
      }
      if (lives.deaths[i] < ALIVE && lives.absorber[i] >= 0) this.drawMerge(c, x(death), y(i), y(lives.absorber[i]), thick, look, death > now);
    }
    c.restore();
    c.fillStyle = look.quiet;
    c.textAlign = "left";
    c.fillText("lifetimes: one bar a state; ● where it is merged into its older neighbour", MARGIN.left, LIVES.top - 12);
  }

  drawMerge(c, x, from, to, thick, look, ahead) {
    c.globalAlpha = ahead ? 0.15 : 0.75;
    c.strokeStyle = c.fillStyle = look.ink;
    c.lineWidth = 0.8;
    line(c, x, from + thick / 2, x, to + thick / 2);
    c.beginPath();
    c.arc(x, from + thick / 2, Math.min(2.6, Math.max(0.8, thick / 2)), 0, 7);
    c.fill();
    c.globalAlpha = 1;
  }

  drawNow(c, x, look, height) {
    const at = x(this.picture.t + 1);
    c.strokeStyle = look.now;
    c.lineWidth = 2;
    line(c, at, SCORES.top - 12, at, height - AXIS + 6);
  }
}

function line(c, x1, y1, x2, y2) {
  c.beginPath();
  c.moveTo(x1, y1);
  c.lineTo(x2, y2);
  c.stroke();
}

// The page's colours, which differ in the dark.
function colours() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    ink: get("ink"), quiet: get("quiet"), rule: get("rule"), opened: get("opened"), joined: get("joined"),
    now: get("now"), query: get("query"), paper: get("paper"), read: get("read"),
    states: Array.from({ length: 8 }, (_, i) => get(`line-${i}`)),
  };
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
  return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= rough);
}

// totals.js

// Layers and heads at a glance, and Theorem 1's bound.


class LayersTable {
  constructor(side, { onLayer }) {
    const heads = [
      ["Layer", ""], ["Opened", "share of tokens that opened a state"], ["Live", "states at the end, mean of the heads"],
      ["Most", "states alive at once, in any head"], ["W", "dense states that a read touches"],
      ["Bytes", "of the states at the end"], ["KV cache", "bytes of one of the same width, in bfloat16"], ["Share", "of the KV cache"],
    ];
    this.rows = side.layers.map((one, i) => {
      const { totals: all } = one;
      return h("tr", {},
        h("th", { scope: "row" }, h("button", { type: "button", class: "plain", onclick: () => onLayer(i) }, `${one.layer}`)),
        h("td", {}, percent(all.boundary_rate, 1), bar(all.boundary_rate, "opened")),
        h("td", {}, all.states.toFixed(1)), h("td", {}, count(all.states_most)), h("td", {}, all.W.toFixed(1)),
        h("td", {}, bytes(all.bytes)), h("td", {}, bytes(all.kv_cache_bytes)), h("td", {}, percent(all.of_kv_cache, all.of_kv_cache < 0.1 ? 1 : 0)));
    });
    this.element = h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "totals of the layers" },
      h("table", { class: "totals" },
        h("thead", {}, h("tr", {}, heads.map(([text, about]) => h("th", { scope: "col", title: about }, text)))),
        h("tbody", {}, this.rows)));
  }

  show(layer) {
    this.rows.forEach((row, i) => row.classList.toggle("picked", i === layer));
  }
}

// A square for every head of every layer: how often it opened a state.
class HeadsMap {
  constructor(side, { onHead }) {
    this.side = side;
    this.canvas = h("canvas", { class: "map", role: "img", "aria-label": "boundary rates of all heads; choose one with the lists above" });
    this.element = h("div", {}, this.canvas);
    this.chosen = [0, 0];
    this.canvas.addEventListener("click", (event) => {
      const box = this.canvas.getBoundingClientRect();
      const { columns, rows } = this.size();
      const head = Math.floor(((event.clientX - box.left) / box.width) * columns);
      const layer = Math.floor(((event.clientY - box.top) / box.height) * rows);
      if (layer < rows && head < side.layers[layer].rates.length) onHead(layer, head);
    });
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  size() {
    return { rows: this.side.layers.length, columns: Math.max(...this.side.layers.map((one) => one.rates.length)) };
  }

  show(layer, head) {
    this.chosen = [layer, head];
    this.draw();
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const { rows, columns } = this.size();
    const scale = window.devicePixelRatio || 1;
    const cell = Math.min(28, Math.max(5, 280 / rows));
    this.canvas.style.height = `${rows * cell}px`;
    this.canvas.width = width * scale;
    this.canvas.height = rows * cell * scale;
    const c = this.canvas.getContext("2d");
    c.scale(scale, scale);
    const look = colours();
    const across = width / columns;
    this.side.layers.forEach((one, layer) => one.rates.forEach((rate, head) => {
      c.globalAlpha = 0.1 + 0.9 * Math.sqrt(rate);
      c.fillStyle = look.opened;
      c.fillRect(head * across, layer * cell, across - 1, cell - 1);
      c.globalAlpha = 1;
      if (cell >= 14 && across >= 34) {
        c.fillStyle = look.ink;
        c.font = "11px system-ui, sans-serif";
        c.textAlign = "center";
        c.fillText(percent(rate, rate < 0.0995 ? 1 : 0), (head + 0.5) * across, (layer + 0.5) * cell + 4);
      }
    }));
    c.strokeStyle = look.ink;
    c.lineWidth = 2;
    c.strokeRect(this.chosen[1] * across + 0.5, this.chosen[0] * cell + 0.5, across - 2, cell - 2);
  }
}

class Bounds {
  constructor(side, partitions, meaning) {
    Object.assign(this, { side, partitions });
    this.body = h("tbody", {});
    this.element = h("div", {},
      h("div", { class: "wide" }, h("table", { class: "bounds" },
        h("thead", {}, h("tr", {}, ["Cut by", "Blocks", "Bound, this head", "Mean of the layer's heads"].map((text) => h("th", { scope: "col" }, text)))),
        this.body)),
      h("p", { class: "caption" }, meaning));
  }

  show(layer, head) {
    const { bounds, blocks } = this.side.layers[layer];
    const largest = Math.max(...bounds[head]);
    fill(this.body, this.partitions.map((name, i) => {
      const mean = bounds.reduce((sum, row) => sum + row[i], 0) / bounds.length;
      return h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, count(blocks[head][i])),
        h("td", {}, few(bounds[head][i]), bar(largest ? bounds[head][i] / largest : 0, "read")), h("td", {}, few(mean)));
    }));
  }
}

function statesSentence(spans, t) {
  return `After token ${count(t)} this head holds ${plural(spans.length, "state")}`;
}

// side.js

// All that is shown of one reading.


const COLOURINGS = { states: "by state", read: "by what the query read", effect: "by effect of leaving out" };

class SideView {
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

// main.js

// The page: its state, and who shows it.


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
})();
