// The page's data: what is small is read at once, a head's blocks when they are asked for, and the latest ones are kept.

import { ALIVE, Lifetimes, deathsOf, levelLifetimes } from "./lifetimes.js";
import { NOTHING, startsAndMerges, unblock, unpackEffects, unpackFixed, unpackScores } from "./packed.js";

const KEPT = 32; // heads

export class Side {
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

export function running(scores) {
  const sums = new Float64Array(scores.length + 1);
  for (let t = 0; t < scores.length; t++) sums[t + 1] = sums[t] + scores[t];
  return sums;
}

export function information(head, span) {
  return head.sums ? head.sums[span.end] - head.sums[span.start] : null;
}

// The data elements of a document.
export function openStore(document) {
  const about = JSON.parse(document.getElementById("about").textContent);
  const find = (name) => document.getElementById(name)?.textContent ?? null;
  const sides = [];
  about.sides.forEach((one, i) => sides.push(new Side(i, one, sides[0], about.bits, find)));
  return { ...about, sides };
}
