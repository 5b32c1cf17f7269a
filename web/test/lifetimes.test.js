import assert from "node:assert/strict";
import { test } from "node:test";
import { ALIVE, COLOURS, Lifetimes, deathsOf, levelLifetimes, spanOf } from "../src/lifetimes.js";

// Random merges, and the states after every step by doing what they say.
function history(length, capacity, seed) {
  let x = seed;
  const random = () => (x = (x * 48271) % 2147483647) / 2147483647;
  const starts = [];
  const merged = [];
  const states = [];
  let living = [];
  for (let t = 0; t < length; t++) {
    if (t === 0 || random() < 0.6) {
      const full = living.length === capacity;
      const pair = full ? Math.floor(random() * (capacity - 1)) : -1;
      if (full) living = living.filter((_, i) => i !== pair + 1);
      starts.push(t);
      merged.push(pair);
      living = [...living, t];
    }
    states.push(living.map((start, i) => [start, living[i + 1] ?? t + 1]));
  }
  return { starts: Int32Array.from(starts), merged: Int32Array.from(merged), states };
}

for (const [length, capacity] of [[1, 2], [63, 2], [500, 7]]) {
  test(`the states of ${length} tokens with room for ${capacity}`, () => {
    const { starts, merged, states } = history(length, capacity, 7 * length);
    const lives = new Lifetimes(starts, deathsOf(starts, merged), length);
    for (let t = 0; t < length; t++) {
      const spans = lives.spans(t);
      assert.deepEqual(spans.map(({ start, end }) => [start, end]), states[t]);
      for (let s = 0; s <= t; s++) {
        const [start, end] = states[t].find(([a, b]) => a <= s && s < b);
        assert.deepEqual([spanOf(spans, s).start, spanOf(spans, s).end], [start, end]);
      }
      assert.equal(spanOf(spans, t + 1), undefined);
    }
  });

  test(`lanes of ${length} tokens with room for ${capacity}: nobody shares one while both live`, () => {
    const { starts, merged } = history(length, capacity, 11 * length);
    const deaths = deathsOf(starts, merged);
    const lives = new Lifetimes(starts, deaths, length);
    assert.ok(lives.laneCount <= capacity);
    for (let i = 0; i < starts.length; i++) {
      for (let j = i + 1; j < starts.length; j++) {
        if (starts[j] < deaths[i]) assert.notEqual(lives.lanes[i], lives.lanes[j]);
      }
      const older = [...starts.keys()].filter((j) => j < i && deaths[j] > starts[i]);
      if (older.length) assert.notEqual(lives.colours[i], lives.colours[older.at(-1)]);
      assert.ok(lives.colours[i] < COLOURS);
    }
  });
}

test("who absorbed whom is the state before it", () => {
  const lives = new Lifetimes(Int32Array.of(0, 2, 5, 6), Int32Array.of(ALIVE, 6, ALIVE, ALIVE), 8);
  assert.equal(lives.absorber[1], 0);
  assert.deepEqual(lives.mergedFrom(lives.spans(7)[0]), [0, 2]);
  assert.deepEqual([lives.opens(5), lives.opens(4)], [true, false]);
});

test("Log-Linear's blocks are those of the bits of t", () => {
  const { starts, deaths } = levelLifetimes(200);
  const lives = new Lifetimes(starts, deaths, 200);
  for (let t = 0; t < 200; t++) {
    const sizes = [];
    for (let bit = 7; bit >= 0; bit--) if ((t >> bit) & 1) sizes.push(2 ** bit);
    assert.deepEqual(lives.spans(t).map((span) => span.end - span.start), [...sizes, 1]);
  }
});

test("no state at all before the first token", () => {
  const lives = new Lifetimes(new Int32Array(0), new Int32Array(0), 0);
  assert.equal(spanOf(lives.spans(0), 0), undefined);
});
