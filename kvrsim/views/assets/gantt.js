"use strict";
/* A Gantt chart that a reader moves: by wheel, drag, touch, buttons and keys.
 *
 * kvGantt(host, {label, describe, moved, selected}) makes one in an element:
 *   label                              what it shows, for screen readers
 *   describe(timeline, lane, index)    [title, [[label, text], ...]] of a span
 *   moved(), selected()                the part that is shown, or the selected range, has changed
 * It returns {show(timelines), zoom(factor), all(), isWhole(), to(from, until), range(), select(range), focus(place), marked,
 * redraw(), pointOf(panel, lane, index), panels(), drawn()}; a place is {panel, place, index}, of a lane and its span.
 * Its canvas tells in data-from and data-to which seconds it shows.
 */
function kvGantt(host, { label, describe, moved = () => {}, selected = () => {} }) {
  const view = kvGanttView(host, label);
  const { canvas, marked, x, timeAt, plot, redraw } = view;
  const laneOf = ({ panel, place }) => view.panels()[panel].lanes[place];

  // -- the part that is shown

  function to(begin, end) {
    const whole = view.whole();
    const span = Math.min(whole, Math.max(whole * 1e-7, 1e-9, end - begin));
    const from = Math.min(Math.max(0, begin), whole - span);
    view.shown(from, from + span);
    moved();
  }
  function select(range) { // seconds, or null
    marked.range = range && [...range].sort((one, other) => one - other);
    redraw();
    selected();
  }
  function zoom(factor, around) {
    const [from, until] = view.range();
    const middle = around ?? (from + until) / 2;
    to(middle - (middle - from) / factor, middle + (until - middle) / factor);
  }
  function pan(share) {
    const [from, until] = view.range();
    to(from + share * (until - from), until + share * (until - from));
  }
  const all = () => to(0, view.whole());
  const isWhole = () => view.range()[1] - view.range()[0] >= view.whole() * (1 - 1e-9);
  const within = (place) => Math.min(view.edges()[1], Math.max(view.edges()[0], place));
  const offset = (event) => event.clientX - canvas.getBoundingClientRect().left;

  // -- pointer

  function found(event) {
    const box = canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    if (px !== within(px)) return null;
    const slack = (3 / plot()) * (view.range()[1] - view.range()[0]);
    for (const [panel, { lanes }] of view.panels().entries()) {
      for (const [place, { lane, y, h }] of lanes.entries()) {
        if (py < y - 1 || py > y + h + 1) continue;
        const index = kvSpans.at(lane, timeAt(px), slack);
        if (index >= 0) return { panel, place, index };
      }
    }
    return null;
  }
  const same = (one, other) => one === other
    || Boolean(one && other && one.panel === other.panel && one.place === other.place && one.index === other.index);
  const words = (place) => describe(view.panels()[place.panel].timeline, laneOf(place).lane, place.index);

  function hover(event) {
    const now = found(event);
    if (now) kv.tip.at(event.clientX, event.clientY, ...words(now));
    else if (marked.hovered) kv.tip.hide();
    if (same(now, marked.hovered)) return;
    marked.hovered = now;
    redraw();
  }
  function leave() {
    kv.tip.hide();
    marked.hovered = null;
    redraw();
  }

  const down = new Map(); // of each finger or button: where it is
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    down.set(event.pointerId, event.clientX);
    canvas.setPointerCapture(event.pointerId);
    const [one, other] = [...down.values()];
    const selects = event.pointerType !== "touch" && !event.shiftKey;
    drag = { x: event.clientX, range: view.range(), selects, moved: false, apart: other === undefined ? null : Math.abs(one - other) };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag || !down.has(event.pointerId)) hover(event);
    else {
      down.set(event.pointerId, event.clientX);
      dragged(event);
    }
  });
  function dragged(event) {
    const [begin, end] = drag.range;
    if (drag.apart && down.size === 2) {
      const [one, other] = [...down.values()];
      const at = (one + other) / 2 - canvas.getBoundingClientRect().left - view.edges()[0];
      const middle = begin + (at / plot()) * (end - begin);
      const factor = Math.max(0.05, Math.abs(one - other) / drag.apart);
      drag.moved = true;
      return to(middle - (middle - begin) / factor, middle + (end - middle) / factor);
    }
    const by = event.clientX - drag.x;
    if (Math.abs(by) > 3) drag.moved = true;
    if (!drag.moved) return undefined;
    kv.tip.hide();
    marked.hovered = null;
    if (drag.selects) return select([drag.x, event.clientX].map((clientX) => timeAt(within(offset({ clientX })))));
    const shift = (by / plot()) * (end - begin);
    return to(begin - shift, end - shift);
  }
  function release(event) {
    down.delete(event.pointerId);
    if (drag && !drag.moved) {
      marked.focused = found(event);
      if (!marked.focused) select(null);
      else {
        kv.say(spoken(marked.focused));
        kv.tip.at(event.clientX, event.clientY, ...words(marked.focused));
      }
    }
    drag = null;
    redraw();
  }
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", (event) => {
    down.delete(event.pointerId);
    drag = null;
  });
  canvas.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && leave());
  canvas.addEventListener("dblclick", (event) => zoom(event.shiftKey ? 1 / 4 : 4, timeAt(offset(event))));
  canvas.addEventListener("wheel", (event) => {
    const unit = event.deltaMode === 1 ? 16 : 1;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      return pan(((event.deltaX || event.deltaY) * unit) / plot());
    }
    if (!event.ctrlKey && !event.metaKey) return undefined; // the page scrolls
    event.preventDefault();
    kv.tip.hide();
    const factor = Math.exp(Math.max(-1.5, Math.min(1.5, -event.deltaY * unit * 0.0025)));
    return zoom(factor, timeAt(within(offset(event))));
  }, { passive: false });

  // -- keyboard

  function spoken(place) {
    const [title, lines] = words(place);
    return [title, ...lines.filter(([, text]) => text).map(([name, text]) => `${name} ${text}`)].join(", ");
  }
  function ends(place) {
    const { lane } = laneOf(place);
    return [lane.start[place.index], lane.end[place.index]];
  }
  function focus(place) {
    marked.focused = place;
    const [begin, end] = ends(place);
    const [from, until] = view.range();
    if (begin < from || end > until) {
      const span = Math.max(until - from, 1.2 * (end - begin));
      to((begin + end) / 2 - span / 2, (begin + end) / 2 + span / 2);
    }
    const box = canvas.getBoundingClientRect();
    const { y, h } = laneOf(place);
    kv.tip.at(box.left + within(x((begin + end) / 2)), box.top + y + h, ...words(place));
    kv.say(spoken(place));
    redraw();
  }
  /* The lanes of all panels, from top to bottom, from the one after `here` on, or before it. */
  function* lanes(here, shift) {
    const every = view.panels().flatMap((one, panel) => one.lanes.map((_, place) => ({ panel, place })));
    let at = here ? every.findIndex(({ panel, place }) => panel === here.panel && place === here.place) + shift : 0;
    for (; every[at]; at += shift) yield every[at];
  }
  function nearest(here, shift, time) {
    for (const lane of lanes(here, shift)) {
      const index = kvSpans.at(laneOf(lane).lane, time, view.whole());
      if (index >= 0) return { ...lane, index };
    }
    return here;
  }
  function step(shift) {
    const now = marked.focused;
    if (!now) return nearest(null, 1, view.range()[0]);
    const last = laneOf(now).lane.count - 1;
    return { ...now, index: Math.max(0, Math.min(last, now.index + shift)) };
  }
  function beside(shift) {
    const now = marked.focused;
    return now ? nearest(now, shift, middle()) : step(0);
  }
  const middle = () => (marked.focused ? (ends(marked.focused)[0] + ends(marked.focused)[1]) / 2 : undefined);
  function enter() {
    if (!marked.focused && marked.range) return to(...marked.range);
    const place = step(0);
    if (!place) return undefined;
    const [begin, end] = ends(place);
    const room = Math.max(end - begin, view.whole() * 1e-6);
    to(begin - room / 2, end + room / 2);
    return focus(place);
  }
  const moves = {
    ArrowLeft: () => step(-1), ArrowRight: () => step(1), Home: () => step(-Infinity), End: () => step(Infinity),
    ArrowUp: () => beside(-1), ArrowDown: () => beside(1),
  };
  const keys = {
    "+": () => zoom(1.6, middle()), "=": () => zoom(1.6, middle()), "-": () => zoom(1 / 1.6, middle()), 0: all, Enter: enter,
    PageUp: () => pan(-0.8), PageDown: () => pan(0.8), w: () => zoom(1.6, middle()), s: () => zoom(1 / 1.6, middle()), a: () => pan(-0.2), d: () => pan(0.2),
    Escape: () => {
      marked.focused = null;
      select(null);
      leave();
    },
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in keys) keys[event.key]();
    else if (event.key in moves) {
      const place = moves[event.key]();
      if (place) focus(place);
    } else return;
    event.preventDefault();
  });
  canvas.addEventListener("blur", () => kv.tip.hide());

  // -- what others do with it

  function show(timelines) {
    const stays = view.panels().length && !isWhole() ? view.range() : null;
    view.fill(timelines, Math.max(1e-9, ...timelines.map((timeline) => timeline.end_s)));
    if (stays) to(...stays);
    else all();
  }
  function pointOf(panel, place, index) {
    const { y, h } = laneOf({ panel, place });
    const [begin, end] = ends({ panel, place, index });
    return [x((begin + end) / 2), y + h / 2];
  }
  return {
    show, zoom, all, isWhole, to, select, focus, marked, redraw, pointOf, range: view.range, panels: view.panels, drawn: () => view.drawn,
  };
}
