"use strict";
/* A Gantt chart on a canvas: timelines below each other on one time axis.
 *
 * kvGantt(host, {label, describe, colourOf}) makes one in an element:
 *   describe(timeline, lane, index)    [title, [[label, text], ...]] of a span
 * It returns {show(timelines), zoom(factor), all(), view(), to(from, until), pointOf(panel, lane, index), drawn}.
 * Its canvas tells in data-from and data-to which seconds it shows.
 */
function kvGantt(host, { label, describe }) {
  const canvas = kv.el("canvas", { tabindex: "0", role: "application", "aria-roledescription": "timeline", "aria-label": label });
  host.append(canvas);
  const AXIS = 30, HEAD = 24, GAP = 12, RIGHT = 10;
  let width = 0, height = 0, left = 62;
  let context = null;
  let panels = [];
  let whole = 1, from = 0, until = 1;
  let hovered = null, focused = null, selecting = null;
  let asked = false;
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
      panel.lanes = panel.timeline.lanes.map((lane) => {
        const base = top + HEAD + lane.rank * row;
        const bar = Math.max(2, row - link - (row > 12 ? 5 : 1.5));
        return lane.link ? { lane, y: base + bar + (row > 12 ? 1.5 : 0.5), h: link } : { lane, y: base, h: bar };
      });
      panel.bottom = top + HEAD + panel.timeline.ranks * row;
      top = panel.bottom + GAP;
    }
    height = top - GAP + AXIS;
    left = width < 640 ? 44 : 66;
    context = kv.canvas(canvas, width, height);
    recolour();
  }

  // -- colours

  let ink, dim, line, card, focusInk, hatch;
  function rgb(value) {
    const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    probe.fillStyle = value;
    probe.fillRect(0, 0, 1, 1);
    return probe.getImageData(0, 0, 1, 1).data;
  }
  function recolour() {
    [ink, dim, line, card, focusInk] = ["--ink", "--dim", "--line", "--card", "--focus"].map(kv.colour);
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

  function redraw() {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      if (context) draw();
    });
  }
  function draw() {
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    axis();
    for (const panel of panels) drawPanel(panel);
    for (const [place, strong] of [[hovered, false], [focused, true]]) if (place) outline(place, strong);
    if (selecting) {
      context.fillStyle = "rgb(127 127 127 / 25%)";
      context.fillRect(Math.min(...selecting), 0, Math.abs(selecting[1] - selecting[0]), height - AXIS);
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
    const [scale, unit] = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]].find(([least]) => until >= least * 0.999) ?? [1e-9, "ns"];
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
    context.font = "11.5px system-ui, sans-serif";
    const every = Math.ceil(13 / row);
    for (let rank = 0; rank < timeline.ranks; rank += every) {
      const name = width < 640 ? timeline.short_names[rank] : timeline.rank_names[rank];
      context.fillStyle = dim;
      context.fillText(fitting(name, left - 6), 2, panel.top + HEAD + (rank + 0.42) * row);
    }
    context.save();
    context.beginPath();
    context.rect(left, panel.top, plot(), panel.bottom - panel.top);
    context.clip();
    if (row >= 14) for (const place of lanes) if (!place.lane.link) details(panel, place);
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
      const words = [layer ? `${name} ${layer}` : name, layer].find((text) => text && context.measureText(text).width + 8 < room);
      if (!words) continue;
      const shade = 6 * kind + (lane.layer[index] > 0 && lane.layer[index] & 1 ? 3 : 0);
      const [red, green, blue] = panel.colours.subarray(shade, shade + 3);
      context.fillStyle = 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#14171c" : "#ffffff";
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

  // -- the part that is shown

  function to(begin, end) {
    const least = Math.max(whole * 1e-7, 1e-9);
    const span = Math.min(whole, Math.max(least, end - begin));
    from = Math.min(Math.max(0, begin), whole - span);
    until = from + span;
    redraw();
  }
  function zoom(factor, around = (from + until) / 2) {
    to(around - (around - from) / factor, around + (until - around) / factor);
  }
  const all = () => to(0, whole);
  const isWhole = () => until - from >= whole * (1 - 1e-9);

  // -- pointer

  function found(event) {
    const box = canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    if (px < left || px > width - RIGHT) return null;
    const slack = (3 / plot()) * (until - from);
    for (let panel = 0; panel < panels.length; panel += 1) {
      for (let place = 0; place < panels[panel].lanes.length; place += 1) {
        const { lane, y, h } = panels[panel].lanes[place];
        if (py < y - 1 || py > y + h + 1) continue;
        const index = kvSpans.at(lane, timeAt(px), slack);
        if (index >= 0) return { panel, place, index };
      }
    }
    return null;
  }
  function same(one, other) {
    return one === other || (one && other && ["panel", "place", "index"].every((key) => one[key] === other[key]));
  }
  function words({ panel, place, index }) {
    const { timeline, lanes } = panels[panel];
    return describe(timeline, lanes[place].lane, index);
  }
  function hover(event) {
    const now = found(event);
    if (now) kv.tip.at(event.clientX, event.clientY, ...words(now));
    else if (hovered) kv.tip.hide();
    if (!same(now, hovered)) {
      hovered = now;
      redraw();
    }
  }
  const down = new Map();
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    down.set(event.pointerId, event.clientX);
    canvas.setPointerCapture(event.pointerId);
    drag = { x: event.clientX, from, until, selects: event.shiftKey || isWhole(), moved: false, pinch: null };
    if (down.size === 2) drag.pinch = Math.abs([...down.values()][0] - [...down.values()][1]);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag || !down.has(event.pointerId)) return hover(event);
    down.set(event.pointerId, event.clientX);
    const box = canvas.getBoundingClientRect();
    if (down.size === 2 && drag.pinch) {
      const [one, other] = [...down.values()];
      const middle = drag.from + (((one + other) / 2 - box.left - left) / plot()) * (drag.until - drag.from);
      const factor = Math.max(0.05, Math.abs(one - other) / drag.pinch);
      return to(middle - (middle - drag.from) / factor, middle + (drag.until - middle) / factor);
    }
    const moved = event.clientX - drag.x;
    if (Math.abs(moved) > 3) drag.moved = true;
    if (!drag.moved) return undefined;
    kv.tip.hide();
    hovered = null;
    if (drag.selects) {
      selecting = [drag.x - box.left, event.clientX - box.left].map((place) => Math.min(width - RIGHT, Math.max(left, place)));
      return redraw();
    }
    const shift = (moved / plot()) * (drag.until - drag.from);
    return to(drag.from - shift, drag.until - shift);
  });
  function release(event) {
    down.delete(event.pointerId);
    if (selecting && drag?.moved) {
      const [begin, end] = selecting.map(timeAt).sort((one, other) => one - other);
      to(begin, end);
    } else if (drag && !drag.moved) {
      focused = found(event);
      if (focused) kv.say(spoken(focused));
    }
    selecting = drag = null;
    redraw();
  }
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => {
    kv.tip.hide();
    hovered = null;
    redraw();
  });
  canvas.addEventListener("dblclick", (event) => zoom(event.shiftKey ? 1 / 4 : 4, timeAt(event.clientX - canvas.getBoundingClientRect().left)));
  canvas.addEventListener("wheel", (event) => {
    const unit = event.deltaMode === 1 ? 16 : 1;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      const shift = ((event.deltaX || event.deltaY) * unit / plot()) * (until - from);
      return to(from + shift, until + shift);
    }
    if (isWhole() && event.deltaY > 0) return undefined; // nothing left to zoom out: the page scrolls
    event.preventDefault();
    kv.tip.hide();
    const factor = Math.exp(Math.max(-1.5, Math.min(1.5, -event.deltaY * unit * 0.0025)));
    return zoom(factor, timeAt(Math.min(width - RIGHT, Math.max(left, event.clientX - canvas.getBoundingClientRect().left))));
  }, { passive: false });

  // -- keyboard

  function spoken(place) {
    const [title, lines] = words(place);
    return [title, ...lines.filter(([, text]) => text).map(([name, text]) => `${name} ${text}`)].join(", ");
  }
  function focus(place) {
    focused = place;
    const { lane, y, h } = panels[place.panel].lanes[place.place];
    const [begin, end] = [lane.start[place.index], lane.end[place.index]];
    if (begin < from || end > until) {
      const span = Math.max(until - from, 1.2 * (end - begin));
      to((begin + end) / 2 - span / 2, (begin + end) / 2 + span / 2);
    }
    const box = canvas.getBoundingClientRect();
    kv.tip.at(box.left + Math.min(width - RIGHT, Math.max(left, x((begin + end) / 2))), box.top + y + h, ...words(place));
    kv.say(spoken(place));
    redraw();
  }
  function beside(shift) {
    const { panel, place, index } = focused;
    const lanes = panels.flatMap((one, number) => one.lanes.map((_, lane) => [number, lane]));
    const here = lanes.findIndex(([one, lane]) => one === panel && lane === place);
    const { start, end } = panels[panel].lanes[place].lane;
    const middle = (start[index] + end[index]) / 2;
    for (let next = here + shift; lanes[next]; next += shift) {
      const [one, lane] = lanes[next];
      const nearest = kvSpans.at(panels[one].lanes[lane].lane, middle, whole);
      if (nearest >= 0) return { panel: one, place: lane, index: nearest };
    }
    return focused;
  }
  function start() {
    for (let panel = 0; panel < panels.length; panel += 1) {
      for (let place = 0; place < panels[panel].lanes.length; place += 1) {
        const index = kvSpans.at(panels[panel].lanes[place].lane, from, until - from);
        if (index >= 0) return { panel, place, index };
      }
    }
    return null;
  }
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const near = focused && (() => {
      const { lane } = panels[focused.panel].lanes[focused.place];
      return (lane.start[focused.index] + lane.end[focused.index]) / 2;
    })();
    const keys = {
      "+": () => zoom(1.6, near ?? undefined), "=": () => zoom(1.6, near ?? undefined), "-": () => zoom(1 / 1.6, near ?? undefined),
      0: all,
      PageUp: () => to(from - 0.8 * (until - from), until - 0.8 * (until - from)),
      PageDown: () => to(from + 0.8 * (until - from), until + 0.8 * (until - from)),
      Escape: () => { focused = null; kv.tip.hide(); redraw(); },
    };
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1, Home: -Infinity, End: Infinity, Enter: 0 };
    if (event.key in keys) keys[event.key]();
    else if (event.key in steps) {
      const place = focused ?? start();
      if (!place) return;
      if (!focused) focus(place);
      else if (event.key === "ArrowUp" || event.key === "ArrowDown") focus(beside(steps[event.key]));
      else {
        const { lane } = panels[place.panel].lanes[place.place];
        if (event.key === "Enter") zoomTo(lane, place.index);
        focus({ ...place, index: Math.max(0, Math.min(lane.count - 1, place.index + steps[event.key])) });
      }
    } else return;
    event.preventDefault();
  });
  function zoomTo(lane, index) {
    const length = Math.max(lane.end[index] - lane.start[index], whole * 1e-6);
    to(lane.start[index] - 0.5 * length, lane.end[index] + 0.5 * length);
  }
  canvas.addEventListener("blur", () => kv.tip.hide());

  // -- what others do with it

  function show(timelines) {
    panels = timelines.map((timeline) => ({ timeline, lanes: [] }));
    const before = whole;
    whole = Math.max(1e-9, ...timelines.map((timeline) => timeline.end_s));
    hovered = focused = null;
    if (before === 1 || isWhole()) [from, until] = [0, whole];
    if (width) layout();
    to(from, until);
  }
  function pointOf(panel, place, index) {
    const { lane, y, h } = panels[panel].lanes[place];
    return [x((lane.start[index] + lane.end[index]) / 2), y + h / 2];
  }
  kv.fit(host, (now) => {
    width = now;
    if (panels.length) layout();
  });
  kv.onTheme(() => context && recolour());
  return Object.assign(told, { show, zoom, all, to, pointOf, view: () => [from, until], panels: () => panels });
}
