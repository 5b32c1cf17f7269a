// Scores and lifetimes over time, on a canvas.

import { h } from "./dom.js";
import { ALIVE } from "./lifetimes.js";
import { count } from "./words.js";

const MARGIN = { left: 44, right: 10 };
const SCORES = { top: 22, height: 92 };
const LIVES = { top: 152, height: 250 };
const AXIS = 24;
const SMALLEST = 40; // tokens in the window

export class Timeline {
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
export function colours() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    ink: get("ink"), quiet: get("quiet"), rule: get("rule"), opened: get("opened"), joined: get("joined"),
    now: get("now"), query: get("query"), paper: get("paper"), read: get("read"),
    states: Array.from({ length: 8 }, (_, i) => get(`line-${i}`)),
  };
}

export function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
  return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= rough);
}
