// Finds text, whatever its case.

export const MOST_FOUND = 10_000;

// Places (first and last character) of a text inside another, from left to right.
export function occurrences(text, wanted) {
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
