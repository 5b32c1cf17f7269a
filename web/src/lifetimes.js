// A memory's history as lifetimes: a start lives from p to its death, and the states after step t are the gaps between
// the starts alive then.

export const ALIVE = 2 ** 31 - 1;
export const COLOURS = 8;

// Deaths of starts whose merges are known, each in the order in which they opened.
export function deathsOf(starts, merged) {
  const deaths = new Int32Array(starts.length).fill(ALIVE);
  const living = [];
  for (let i = 0; i < starts.length; i++) {
    if (merged[i] >= 0) deaths[living.splice(merged[i] + 1, 1)[0]] = starts[i];
    living.push(i);
  }
  return deaths;
}

// Log-Linear's blocks: a start p ends its lowest set bit later, and 0 never.
export function levelLifetimes(length) {
  const starts = Int32Array.from({ length }, (_, p) => p);
  const deaths = starts.map((p) => {
    const death = p + (p & -p);
    return p === 0 || death >= length ? ALIVE : death;
  });
  return { starts, deaths };
}

export class Lifetimes {
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
export function spanOf(spans, token) {
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
