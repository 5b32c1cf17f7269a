// Blocks of numbers as src/dla/inspect/packed.py makes them: base64 of raw DEFLATE.

export const NOTHING = "-";
const TOP_SCORE = 2;

export async function unblock(text) {
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

export function leb128(bytes) {
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
export function startsAndMerges(bytes) {
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
export function unpackScores(bytes, bits, length) {
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
export function unpackFixed(bytes, largest) {
  const numbers = new Float64Array(bytes.length / 2);
  for (let i = 0; i < numbers.length; i++) numbers[i] = ((bytes[2 * i] | (bytes[2 * i + 1] << 8)) / 65535) * largest;
  return numbers;
}

// Rows of head, state, KL and probabilities.
export function unpackEffects(bytes, candidates) {
  const numbers = new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength));
  const rows = [];
  for (let i = 0; i < numbers.length; i += 3 + candidates) {
    const [head, state, kl, ...p] = numbers.subarray(i, i + 3 + candidates);
    rows.push({ head, state, kl, p });
  }
  return rows;
}
