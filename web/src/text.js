// The text, token by token, coloured by what the memory does with it. All of it stands in the page as plain text, in
// blocks; a block's tokens become elements when it comes near the window, and are painted when they are seen.

import { fill, h } from "./dom.js";
import { spanOf } from "./lifetimes.js";
import { visible } from "./words.js";

const BLOCK = 256; // tokens

export class TextView {
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
export function tokenSentence(side, head, spans, token, t) {
  const name = `token ${token}, “${visible(side.pieces[token])}”`;
  const span = token <= t ? spanOf(spans, token) : undefined;
  if (!span) return `${name}: not read yet`;
  const score = head.scores ? `, score ${head.scores[token].toFixed(2)}` : "";
  const opened = head.lives.opens(token) ? ", opened a state" : ", joined the current state";
  return `${name}${score}${opened}; now in state ${spans.indexOf(span) + 1} (tokens ${span.start} to ${span.end - 1})`;
}
