import assert from "node:assert/strict";
import { test } from "node:test";
import { deflateRawSync } from "node:zlib";
import { leb128, startsAndMerges, unblock, unpackEffects, unpackFixed, unpackScores } from "../src/packed.js";

test("numbers of any length come back", () => {
  assert.deepEqual(leb128([0, 127, 0x80, 1, 0xff, 0xff, 3, 0xff, 0xff, 0xff, 0xff, 7]), [0, 127, 128, 65535, 2 ** 31 - 1]);
});

test("a block is base64 of raw DEFLATE", async () => {
  const bytes = Uint8Array.from({ length: 1000 }, (_, i) => (i * i) % 251);
  assert.deepEqual(await unblock(deflateRawSync(bytes).toString("base64")), bytes);
});

test("starts are gaps, merges one more than the pair", () => {
  const { starts, merged } = startsAndMerges([3, 0, 4, 1, 0, 0, 2]);
  assert.deepEqual([...starts], [0, 4, 5]);
  assert.deepEqual([...merged], [-1, -1, 1]);
});

test("scores of 4, 8 and 16 bits reach from 0 to 2", () => {
  assert.deepEqual([...unpackScores([0xf0, 0x80], 4, 3)], [2, 0, (8 / 15) * 2]);
  assert.deepEqual([...unpackScores([255, 0], 8, 2)], [2, 0]);
  assert.deepEqual([...unpackScores([255, 255, 1, 0], 16, 2)], [2, 2 / 65535]);
});

test("fixed point is in units of the largest", () => {
  assert.deepEqual([...unpackFixed([255, 255, 0, 0], 3.5)], [3.5, 0]);
});

test("effects are rows, wherever their bytes stand in a buffer", () => {
  const numbers = Float32Array.from([2, 7, 0.5, 0.25, 0.125, 3, 1, 1.5, 0.75, 0]);
  const shifted = new Uint8Array(numbers.byteLength + 1);
  shifted.set(new Uint8Array(numbers.buffer), 1);
  const rows = unpackEffects(shifted.subarray(1), 2);
  assert.deepEqual(rows, [{ head: 2, state: 7, kl: 0.5, p: [0.25, 0.125] }, { head: 3, state: 1, kl: 1.5, p: [0.75, 0] }]);
});
