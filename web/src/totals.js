// Layers and heads at a glance, and Theorem 1's bound.

import { bar, fill, h } from "./dom.js";
import { bytes, count, few, percent, plural } from "./words.js";
import { colours } from "./timeline.js";

export class LayersTable {
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
export class HeadsMap {
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

export class Bounds {
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

export function statesSentence(spans, t) {
  return `After token ${count(t)} this head holds ${plural(spans.length, "state")}`;
}
