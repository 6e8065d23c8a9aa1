"use strict";
/* The drawing of a Gantt chart: lanes, bars, words and the axis of timelines below each other on one time axis.
 *
 * kvGanttView(host, label) makes a canvas in an element; what it returns: canvas, panels() with the lanes and where they
 * are, x(time) and timeAt(x) in CSS pixels, plot() the width of the lanes, edges() their left and right end, redraw(),
 * range() the seconds shown, and shown(...) to change what is drawn. gantt.js moves it.
 */
function kvGanttView(host, label) {
  const canvas = kv.el("canvas", {
    tabindex: "0", role: "application", "aria-roledescription": "timeline", "aria-label": label,
  });
  host.append(canvas);
  const AXIS = 30;
  const HEAD = 24;
  const GAP = 12;
  const RIGHT = 10;
  const SMALL = "11.5px system-ui, sans-serif";
  let width = 0;
  let height = 0;
  let left = 62;
  let context = null;
  let panels = [];
  let whole = 1;
  let [from, until] = [0, 1];
  const marked = { hovered: null, focused: null, range: null, hits: null, path: true };
  const told = { drawn: 0 };
  const rows = document.createElement("canvas");

  const plot = () => width - left - RIGHT;
  const x = (time) => left + ((time - from) / (until - from)) * plot();
  const timeAt = (place) => from + ((place - left) / plot()) * (until - from);

  // -- layout

  function rowHeight(ranks) {
    const room = width < 640 ? 300 : 400;
    return Math.max(5, Math.min(32, Math.floor(room / ranks)));
  }
  function layout() {
    let top = 0;
    for (const panel of panels) {
      const row = rowHeight(panel.timeline.ranks);
      const link = Math.max(1.5, Math.round(row * 0.2));
      panel.top = top;
      panel.row = row;
      panel.widest = String(Math.max(0, ...panel.timeline.lanes.map((lane) => lane.layer.reduce((most, layer) => Math.max(most, layer), 0))));
      panel.lanes = panel.timeline.lanes.map((lane) => {
        const base = top + HEAD + lane.rank * row;
        const bar = Math.max(2, row - link - (row > 12 ? 5 : 1.5));
        return lane.link ? { lane, y: base + bar + (row > 12 ? 1.5 : 0.5), h: link } : { lane, y: base, h: bar };
      });
      panel.bottom = top + HEAD + panel.timeline.ranks * row;
      top = panel.bottom + GAP;
    }
    height = top - GAP + AXIS;
    context = kv.canvas(canvas, width, height);
    context.font = SMALL;
    const names = panels.flatMap((panel) => panel.timeline.rank_names);
    left = width < 640 ? 44 : Math.min(150, 14 + Math.max(...names.map((name) => context.measureText(name).width)));
    recolour();
  }

  // -- colours

  let ink, dim, line, card, focusInk, accent, hatch;
  function rgb(value) {
    const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    probe.fillStyle = value;
    probe.fillRect(0, 0, 1, 1);
    return probe.getImageData(0, 0, 1, 1).data;
  }
  function recolour() {
    [ink, dim, line, card, focusInk, accent] = ["--ink", "--dim", "--line", "--card", "--focus", "--accent"].map(kv.colour);
    const tile = document.createElement("canvas");
    tile.width = tile.height = 7;
    const pen = tile.getContext("2d");
    pen.strokeStyle = kv.colour("--hatch");
    for (const shift of [-7, 0, 7]) {
      pen.moveTo(shift, 7);
      pen.lineTo(shift + 7, 0);
    }
    pen.stroke();
    hatch = context.createPattern(tile, "repeat");
    const back = rgb(card);
    for (const panel of panels) {
      panel.colours = new Float32Array(panel.timeline.kinds.length * 6);
      panel.waits = [];
      panel.timeline.kinds.forEach((kind, index) => {
        const waits = kind.colour === "--op-waiting";
        const base = rgb(kv.colour(kind.colour));
        panel.waits.push(waits);
        for (let part = 0; part < 3; part += 1) {
          panel.colours[6 * index + part] = base[part];
          panel.colours[6 * index + 3 + part] = waits ? base[part] : base[part] + 0.42 * (back[part] - base[part]);
        }
      });
    }
    redraw();
  }

  // -- drawing

  const redraw = kv.soon(() => context && draw());
  function draw() {
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    axis();
    for (const panel of panels) drawPanel(panel);
    for (const [place, strong] of [[marked.hovered, false], [marked.focused, true]]) if (place) outline(place, strong);
    if (marked.range) {
      const [one, other] = marked.range.map((time) => Math.min(width - RIGHT, Math.max(left, x(time))));
      context.fillStyle = context.strokeStyle = accent;
      context.globalAlpha = 0.16;
      context.fillRect(one, 0, other - one, height - AXIS);
      context.globalAlpha = 1;
      context.strokeRect(one, -2, other - one, height - AXIS + 2);
    }
    canvas.dataset.from = from;
    canvas.dataset.to = until;
    told.drawn += 1;
  }
  function step(span, most) {
    const rough = span / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  }
  function axis() {
    const size = step(until - from, Math.max(2, plot() / 90));
    const bottom = height - AXIS;
    const [scale, unit] = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]].find(([least]) => until >= least * 0.999) ?? [1e-9, "ns"];
    const digits = Math.max(0, Math.ceil(-Math.log10((size / scale) * 1.0001)));
    context.textAlign = "center";
    for (let number = Math.ceil(from / size); number * size <= until; number += 1) {
      const place = Math.round(x(number * size)) + 0.5;
      context.strokeStyle = line;
      context.beginPath();
      context.moveTo(place, HEAD);
      context.lineTo(place, bottom + 4);
      context.stroke();
      context.fillStyle = dim;
      const words = `${((number * size) / scale).toFixed(digits)} ${unit}`;
      const half = context.measureText(words).width / 2;
      if (place - half >= 0 && place + half <= width) context.fillText(words, place, bottom + 14);
    }
    // Which part of the whole is shown.
    const [begin, end] = [left + (from / whole) * plot(), left + (until / whole) * plot()];
    context.fillStyle = line;
    context.fillRect(left, height - 4, plot(), 3);
    context.fillStyle = dim;
    context.fillRect(begin, height - 4, Math.max(4, end - begin), 3);
  }
  function drawPanel(panel) {
    const { timeline, lanes, row } = panel;
    const density = canvas.width / width;
    const columns = Math.max(1, Math.round(plot() * density));
    rows.width = columns;
    rows.height = lanes.length;
    const pen = rows.getContext("2d");
    const image = pen.createImageData(columns, lanes.length);
    lanes.forEach(({ lane }, index) => {
      kvSpans.raster(lane, from, until, image.data.subarray(4 * columns * index, 4 * columns * (index + 1)), panel.colours);
    });
    pen.putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    lanes.forEach(({ y, h }, index) => context.drawImage(rows, 0, index, columns, 1, left, y, plot(), h));
    context.textAlign = "left";
    context.fillStyle = ink;
    context.font = "600 12.5px system-ui, sans-serif";
    const shown = fitting(timeline.title, width - 4);
    context.fillText(shown, 2, panel.top + HEAD / 2 - 2);
    context.font = SMALL;
    const every = Math.ceil(13 / row);
    for (let rank = 0; rank < timeline.ranks; rank += every) {
      const name = width < 640 ? String(rank) : timeline.rank_names[rank];
      context.fillStyle = dim;
      context.fillText(fitting(name, left - 6), 2, panel.top + HEAD + (rank + 0.42) * row);
    }
    context.save();
    context.beginPath();
    context.rect(left, panel.top, plot(), panel.bottom - panel.top);
    context.clip();
    if (row >= 14) for (const place of lanes) if (!place.lane.link) details(panel, place);
    if (marked.hits) spotlight(panel);
    if (marked.path) drawPath(panel);
    arrows(panel);
    context.strokeStyle = ink;
    context.lineWidth = timeline.first_tokens_s.length > 1 ? 0.8 : 1.5;
    for (const moment of timeline.first_tokens_s) {
      const place = x(moment);
      context.beginPath();
      context.moveTo(place, panel.top + HEAD - 4);
      context.lineTo(place, panel.bottom);
      context.stroke();
    }
    context.restore();
    context.lineWidth = 1;
  }
  /* What was searched for keeps its colour, all else fades. */
  function spotlight(panel) {
    context.globalAlpha = 0.8;
    context.fillStyle = card;
    for (const { y, h } of panel.lanes) context.fillRect(left, y - 0.5, plot(), h + 1);
    context.globalAlpha = 1;
    const colours = panel.timeline.kinds.map((kind) => kv.colour(kind.colour));
    let before = [-1, -1]; // lane and right end of the last one that was drawn
    for (const { place, index } of marked.hits.get(panel.timeline)) {
      const { lane, y, h } = panel.lanes[place];
      const [begin, end] = [x(lane.start[index]), x(lane.end[index])];
      if (end < left || begin > width || (place === before[0] && end < before[1])) continue;
      context.fillStyle = colours[lane.kind[index]];
      context.fillRect(begin, y, Math.max(1, end - begin), h);
      before = [place, begin + 1];
    }
  }
  /* The critical path along the lower edges of its operations. */
  function drawPath({ timeline, lanes }) {
    timeline.path ??= kvSpans.path(timeline);
    const line = new Path2D();
    let isFirst = true;
    for (const { place, index } of timeline.path) {
      const { lane, y, h } = lanes[place];
      const [begin, end] = [lane.start[index], lane.end[index]];
      if (begin > until || end < from) continue;
      const low = y + h - (lane.link ? h / 2 : 1.5);
      line[isFirst ? "moveTo" : "lineTo"](x(end), low);
      line.lineTo(x(begin), low);
      isFirst = false;
    }
    context.strokeStyle = card;
    context.lineWidth = 4;
    context.stroke(line);
    context.strokeStyle = focusInk;
    context.lineWidth = 2;
    context.stroke(line);
    context.lineWidth = 1;
  }
  /* From messages to their receivers, where few are shown. */
  function arrows({ timeline, lanes, row }) {
    const shown = [];
    for (const { lane, y, h } of row < 10 ? [] : lanes) {
      for (let index = lane.link ? kvSpans.first(lane, from) : lane.count; index < lane.count && lane.start[index] < until; index += 1) {
        const to = lanes.find((one) => !one.lane.link && one.lane.rank === timeline.kinds[lane.kind[index]].peer);
        if (to) shown.push([x(lane.start[index]), y + h / 2, x(lane.end[index]), to.y < y ? to.y + to.h : to.y]);
        if (shown.length > plot() / 12) return;
      }
    }
    context.strokeStyle = context.fillStyle = ink;
    for (const [begin, y, end, to] of shown) {
      const down = Math.sign(to - y);
      context.beginPath();
      context.moveTo(begin, y);
      context.bezierCurveTo(begin, (y + to) / 2, end, (y + to) / 2, end, to - 5 * down);
      context.stroke();
      context.beginPath();
      context.moveTo(end, to);
      context.lineTo(end - 3, to - 6 * down);
      context.lineTo(end + 3, to - 6 * down);
      context.fill();
    }
  }
  /* Hatches, edges and words of spans that are wide enough. */
  function details(panel, { lane, y, h }) {
    const least = (6 / plot()) * (until - from);
    context.textAlign = "center";
    for (let index = kvSpans.first(lane, from); index < lane.count && lane.start[index] < until; index += 1) {
      if (lane.end[index] - lane.start[index] < least) continue;
      const begin = Math.max(left, x(lane.start[index]));
      const room = Math.min(width - RIGHT, x(lane.end[index])) - begin;
      const kind = lane.kind[index];
      if (panel.waits[kind]) {
        context.fillStyle = hatch;
        context.fillRect(begin, y, room, h);
        continue;
      }
      context.fillStyle = card;
      context.fillRect(begin, y, 0.75, h);
      const layer = lane.layer[index] >= 0 ? String(lane.layer[index]) : "";
      const name = panel.timeline.kinds[kind].name;
      const fits = [layer ? `${name} ${layer}` : name, layer && panel.widest].findIndex((text) => text && context.measureText(text).width + 7 < room);
      const words = [layer ? `${name} ${layer}` : name, layer][fits];
      if (!words) continue;
      const shade = 6 * kind + (lane.layer[index] > 0 && lane.layer[index] & 1 ? 3 : 0);
      const [red, green, blue] = panel.colours.subarray(shade, shade + 3);
      context.fillStyle = kv.inkOn(red, green, blue);
      context.fillText(words, begin + room / 2, y + h / 2 + 0.5);
    }
    context.textAlign = "left";
  }
  function fitting(words, room) {
    if (context.measureText(words).width <= room) return words;
    let shown = words;
    while (shown.length > 1 && context.measureText(`${shown}…`).width > room) shown = shown.slice(0, -1);
    return `${shown}…`;
  }
  function outline({ panel, place, index }, strong) {
    const held = panels[panel]?.lanes[place];
    if (!held) return;
    const begin = Math.max(left - 2, x(held.lane.start[index]));
    const end = Math.min(width - RIGHT + 2, x(held.lane.end[index]));
    if (end < left || begin > width - RIGHT) return;
    context.strokeStyle = strong ? focusInk : ink;
    context.lineWidth = strong ? 2.5 : 1.5;
    context.strokeRect(begin - 1, held.y - 1, Math.max(2, end - begin) + 2, held.h + 2);
    context.lineWidth = 1;
  }

  // -- what gantt.js does with it

  function shown(begin, end) {
    [from, until] = [begin, end];
    redraw();
  }
  function fill(timelines, longest) {
    panels = timelines.map((timeline) => ({ timeline, lanes: [] }));
    whole = longest;
    Object.assign(marked, { hovered: null, focused: null });
    if (width) layout();
  }
  kv.fit(host, (now) => {
    width = now;
    if (panels.length) layout();
  });
  kv.onTheme(() => context && recolour());
  return Object.assign(told, {
    canvas, marked, x, timeAt, plot, redraw, shown, fill,
    panels: () => panels, range: () => [from, until], whole: () => whole, edges: () => [left, width - RIGHT],
  });
}
