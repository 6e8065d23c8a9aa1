"use strict";
/* A grid of coloured cells with named rows and columns, as SVG: pointed at, clicked, or walked through with the arrow keys.
 *
 * kvGrid(host, {label, xTitle, yTitle, columns, rows, cell, chosen, pointed, picked}) returns {draw()}:
 *   columns, rows    texts; rows from the bottom up
 *   cell(x, y)       {fill, lines: [texts], mark: a sign where there is no room for texts}, or null: empty
 *   chosen()         [x, y] of the cell that is kept, or null where it is not in this grid
 *   pointed(x, y, event)   the pointer is on a cell; pointed(null): it is on none
 *   picked(x, y)     the reader keeps a cell
 */
function kvGrid(host, about) {
  const { columns, rows } = about;
  const LEFT = Math.max(34, 14 + 7.2 * Math.max(...rows.map((text) => text.length)));
  const BOTTOM = 40, TOP = 4, RIGHT = 6;
  const svg = kv.el("svg", { class: "grid", tabindex: "0", role: "application", "aria-roledescription": "map", "aria-label": about.label });
  host.append(svg);
  kv.picture(host, about.label);
  const part = (name, about, ...kids) => kv.el(name, { svg: true, ...about }, ...kids);
  let width = 0, over = null;
  const high = () => Math.max(16, Math.min(46, Math.floor(300 / rows.length)));
  const wide = () => (width - LEFT - RIGHT) / columns.length;

  const outline = (place, name) => part("rect", { class: name, x: LEFT + place[0] * wide() + 1, y: TOP + (rows.length - 1 - place[1]) * high() + 1,
    width: wide() - 2, height: high() - 2, rx: 3, fill: "none" });
  // Names are written smaller where they are long. Where one of them would be too small, none is written.
  const LEAST = 8.5, USUAL = 11.5;
  const size = (line) => Math.min(USUAL, (wide() - 5) / (0.66 * Math.max(1, line.length)));
  function texts(one, x, y, sizes) {
    const lines = sizes.length ? one.lines.slice(0, sizes.length) : [one.mark ?? ""];
    return lines.map((line, index) => part("text", {
      x: x + wide() / 2, y: y + high() / 2 + 4 + (lines.length > 1 ? (index - 0.5) * 14 : 0), "text-anchor": "middle", fill: kvInk(one.fill),
      class: index ? "in" : "in strong", "font-size": sizes[index] ?? USUAL, text: line,
    }));
  }
  function draw() {
    const height = TOP + rows.length * high() + BOTTOM;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("width", width);
    svg.setAttribute("height", height);
    const cells = [];
    const all = rows.flatMap((_, y) => columns.map((__, x) => about.cell(x, y))).filter(Boolean);
    const sizes = [];  // of the first and second lines that there is room for
    for (const index of high() >= 34 ? [0, 1] : [0]) {
      const least = Math.min(...all.map((one) => size(one.lines[index] ?? "")));
      if (sizes.length < index || least < LEAST) break;
      sizes.push(least);
    }
    for (let y = 0; y < rows.length; y += 1) for (let x = 0; x < columns.length; x += 1) {
      const one = about.cell(x, y);
      const at = { x: LEFT + x * wide(), y: TOP + (rows.length - 1 - y) * high(), width: wide(), height: high() };
      if (one === null) {
        cells.push(part("rect", { ...at, class: "none" }));
        continue;
      }
      cells.push(part("rect", { ...at, fill: one.fill, class: "cell", "data-x": x, "data-y": y }));
      cells.push(...texts(one, at.x, at.y, sizes));
    }
    const step = Math.ceil((7.4 * Math.max(...columns.map((text) => text.length)) + 8) / wide());
    const names = [
      ...rows.map((text, y) => part("text", { x: LEFT - 8, y: TOP + (rows.length - 0.5 - y) * high() + 4, "text-anchor": "end", text })),
      ...columns.map((text, x) => (x % step ? null
        : part("text", { x: LEFT + (x + 0.5) * wide(), y: height - BOTTOM + 16, "text-anchor": "middle", text }))),
      part("text", { x: LEFT + (width - LEFT - RIGHT) / 2, y: height - 6, "text-anchor": "middle", text: about.xTitle, class: "title" }),
    ];
    svg.replaceChildren(...cells, ...names, ...marked());
  }
  function marked() {
    const kept = about.chosen();
    return [kept && outline(kept, "kept"), over && outline(over, "over")].filter(Boolean);
  }
  function mark() {
    svg.querySelectorAll(".kept, .over").forEach((one) => one.remove());
    svg.append(...marked());
  }
  function under(event) {
    const box = svg.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left - LEFT) / wide());
    const y = rows.length - 1 - Math.floor((event.clientY - box.top - TOP) / high());
    return x >= 0 && x < columns.length && y >= 0 && y < rows.length && about.cell(x, y) !== null ? [x, y] : null;
  }
  const leave = () => {
    over = null;
    mark();
    about.pointed(null);
  };
  svg.addEventListener("pointermove", (event) => {
    const now = under(event);
    if (now === null) return over === null ? undefined : leave();
    if (over === null || over[0] !== now[0] || over[1] !== now[1]) {
      over = now;
      mark();
    }
    return about.pointed(now[0], now[1], event);
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("click", (event) => {
    const now = under(event);
    if (now) about.picked(...now);
  });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const [x, y] = about.chosen() ?? [0, 0];
    const to = [Math.max(0, Math.min(columns.length - 1, x + step[0])), Math.max(0, Math.min(rows.length - 1, y + step[1]))];
    if (about.cell(...to) !== null) about.picked(...to);
  });
  kv.fit(host, (now) => {
    width = now;
    draw();
  });
  return { draw, mark };
}

/* Black or white, whichever is easier to read on a colour #rrggbb. */
function kvInk(fill) {
  return kv.inkOn(...[1, 3, 5].map((at) => parseInt(fill.slice(at, at + 2), 16)));
}

/* A colour of a scale from 0 to 1 that colour-blind readers can follow, dark to light (viridis). */
function kvRamp(share) {
  const stops = ["#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725"];
  const place = Math.max(0, Math.min(1, share)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(place));
  const mix = (at) => {
    const [a, b] = [stops[low], stops[low + 1]].map((one) => parseInt(one.slice(at, at + 2), 16));
    return Math.round(a + (place - low) * (b - a)).toString(16).padStart(2, "0");
  };
  return `#${mix(1)}${mix(3)}${mix(5)}`;
}
