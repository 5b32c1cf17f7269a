// Numbers and pieces of text for people.

export function count(value) {
  return Math.round(value).toLocaleString("en");
}

export function percent(share, digits = 0) {
  return `${(100 * share).toFixed(digits)}%`;
}

export function probability(p) {
  if (p > 0 && p < 0.0005) return "under 0.1%";
  return percent(p, 1);
}

export function bytes(value) {
  let size = value;
  for (const unit of ["B", "KiB", "MiB"]) {
    if (size < 1024) return `${Number(size.toPrecision(3))} ${unit}`;
    size /= 1024;
  }
  return `${Number(size.toPrecision(3))} GiB`;
}

export function few(value) {
  return Number(value.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 3 });
}

export function plural(n, what) {
  return `${count(n)} ${what}${n === 1 ? "" : "s"}`;
}

// Line breaks and tabs as signs, so that a token that is nothing else can be seen.
export function visible(text) {
  return text.replace(/\r/g, "␍").replace(/\n/g, "⏎").replace(/\t/g, "⇥");
}

// The beginning and the end of a text, on one line, in `room` characters.
export function excerpt(text, room) {
  const line = visible(text);
  if (line.length <= room) return line;
  const half = Math.floor((room - 3) / 2);
  return `${line.slice(0, half)} … ${line.slice(-half)}`;
}

export function quoted(text) {
  return `“${visible(text)}”`;
}

// What a layer's memory does, in one sentence.
export function ruleSentence(layer) {
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
