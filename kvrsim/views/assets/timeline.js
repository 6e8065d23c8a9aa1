"use strict";
/* The page of timelines: which two are shown, search, the critical path, and the seconds of a range as a table. */
kv.ready((data) => {
  const host = document.getElementById("gantt");
  if (!host) return;
  const timelines = data.timelines.map(kvSpans.decode);
  const WAITS = "--op-waiting";
  const labels = new Map(data.legend.map(([words, variable]) => [variable, words]));
  const pair = (range) => range.map((time) => time.toPrecision(7)).join();
  const chart = kvGantt(host, {
    label: `Timelines of ${timelines.map((one) => one.name).join(", ")}. Arrow keys go from operation to operation, plus and`
      + " minus zoom, 0 shows all. The table below holds the same times.",
    moved: () => kv.view.set("zoom", chart.isWhole() ? null : pair(chart.range())),
    selected() {
      kv.view.set("range", chart.marked.range && pair(chart.marked.range));
      sums();
    },
    describe(timeline, lane, index) {
      const kind = timeline.kinds[lane.kind[index]];
      return [kind.colour === WAITS ? `waits: ${kind.name}` : kind.name, [
        ["operation", labels.get(kind.colour)],
        ["timeline", timelines.length > 1 ? timeline.name : ""],
        ["rank", lane.link ? `${lane.rank} to ${kind.peer}` : String(lane.rank)],
        ["layer", lane.layer[index] < 0 ? "" : String(lane.layer[index])],
        ["start", kv.seconds(lane.start[index])],
        ["duration", kv.seconds(lane.end[index] - lane.start[index])],
        ["bytes", kind.bytes === null ? "" : kv.bytes(kind.bytes)],
        ["basis", kind.basis],
      ]];
    },
  });
  window.kvTimelineChart = chart;

  // -- which are shown

  function chooser(label, ident, chosen) {
    const options = timelines.map((one, index) => kv.el("option", { value: index, text: one.name, selected: index === chosen }));
    if (ident === "below") options.unshift(kv.el("option", { value: -1, text: "none", selected: chosen < 0 }));
    const select = kv.el("select", { id: ident, on: { change: () => {
      kv.view.set(ident, select.selectedOptions[0].text);
      show();
    } } }, ...options);
    kv.view.keep(ident, (name) => {
      select.value = options.find((one) => one.text === name)?.value ?? select.value;
      show();
    });
    return [select, kv.el("label", {}, label, select)];
  }
  const [above, aboveLabel] = chooser("Above", "above", 0);
  const [below, belowLabel] = chooser("Below", "below", timelines.length > 1 ? 1 : -1);
  const shown = () => [above, below].map((select) => Number(select.value)).filter((index) => index >= 0);
  function show() {
    const some = shown().map((index) => timelines[index]);
    chart.show(some);
    document.dispatchEvent(new CustomEvent("kv-shown", { detail: shown() }));
    const used = new Set(some.flatMap((timeline) => timeline.kinds.map((kind) => kind.colour)));
    legend.replaceChildren(...data.legend.filter(([, variable]) => used.has(variable)).map(([words, variable]) => kv.el("li", {}, kv.chip(variable), words)));
    limits.replaceChildren(...some.map((timeline) => kv.el("p", { class: "hint", text: limit(timeline) })));
    find();
    sums();
  }
  const button = (id, text, title, clicked) => kv.el("button", { id, type: "button", text, title, "aria-label": title, on: { click: clicked } });

  // -- search

  const box = kv.el("input", { id: "find", type: "search", placeholder: "attention layer 3", autocomplete: "off", spellcheck: "false", on: {
    input: () => find(),
    keydown: (event) => event.key === "Enter" && go(event.shiftKey ? -1 : 1),
  } });
  const count = kv.el("output", { id: "found" });
  let hits = []; // of all timelines that are shown, by their beginning
  let here = -1;
  function find() {
    const wanted = box.value.trim().toLowerCase();
    kv.view.set("find", wanted || null);
    const [layer, rank] = ["layer", "rank"].map((name) => wanted.match(new RegExp(`\\b${name} (\\d+)`))?.[1]);
    const words = wanted.replace(/\b(layer|rank) \d+/g, "").split(" ").filter(Boolean);
    const found = new Map(chart.panels().map(({ timeline }) => [timeline, []]));
    hits = [];
    chart.panels().forEach(({ timeline }, panel) => timeline.lanes.forEach((lane, place) => {
      if (!wanted || (rank !== undefined && lane.rank !== Number(rank))) return;
      const fit = timeline.kinds.map((kind) => words.every((word) => `${kind.name} ${labels.get(kind.colour)}`.toLowerCase().includes(word)));
      for (let index = 0; index < lane.count; index += 1) {
        if (!fit[lane.kind[index]] || (layer !== undefined && lane.layer[index] !== Number(layer))) continue;
        found.get(timeline).push({ place, index });
        hits.push({ panel, place, index, start: lane.start[index] });
      }
    }));
    hits.sort((one, other) => one.panel - other.panel || one.start - other.start || one.place - other.place);
    here = -1;
    chart.marked.hits = wanted ? found : null;
    count.textContent = wanted ? `${hits.length} found` : "";
    chart.redraw();
  }
  function go(step) {
    if (!hits.length) return;
    here = here < 0 && step < 0 ? hits.length - 1 : (here + step + hits.length) % hits.length;
    count.textContent = `${here + 1} of ${hits.length}`;
    chart.focus(hits[here]);
  }
  kv.view.keep("find", (text) => {
    box.value = text;
    find();
  });

  // -- the critical path

  function limit(timeline) {
    const shares = timeline.shares.length ? timeline.shares : along(timeline);
    const words = shares.slice(0, 4).map(([label, share]) => `${label} ${Math.round(100 * share)} %`);
    return `Critical path of ${timeline.name}: ${words.join(", ")}.`;
  }
  /* Of a timeline that was measured, or simulated with noise: the shares of the seconds along the path. */
  function along(timeline) {
    timeline.path ??= kvSpans.path(timeline);
    const parts = new Map();
    for (const { place, index, seconds } of timeline.path) {
      const label = labels.get(timeline.kinds[timeline.lanes[place].kind[index]].colour);
      parts.set(label, (parts.get(label) ?? 0) + seconds / timeline.first_tokens_s[0]);
    }
    return [...parts].sort(([, one], [, other]) => other - one);
  }
  const path = button("path", "Critical path", "Show the operations that TTFT waits for", () => {
    chart.marked.path = !chart.marked.path;
    kv.view.set("path", chart.marked.path ? null : "off");
    path.setAttribute("aria-pressed", String(chart.marked.path));
    chart.redraw();
  });
  path.setAttribute("aria-pressed", "true");
  kv.view.keep("path", () => path.click());

  host.before(kv.el("div", { class: "tools" }, ...(timelines.length > 1 ? [aboveLabel, belowLabel] : []),
    kv.el("span", { class: "group" }, button("zoom-in", "+", "Zoom in", () => chart.zoom(2)),
      button("zoom-out", "−", "Zoom out", () => chart.zoom(0.5)), button("zoom-all", "All", "Show all", chart.all)),
    kv.el("span", { class: "group" }, kv.el("label", {}, "Find", box), button("previous", "↑", "Previous match", () => go(-1)),
      button("next", "↓", "Next match", () => go(1)), count), path));
  const legend = kv.el("ul", { class: "legend" });
  const limits = kv.el("div", { id: "limits" });
  host.append(legend);
  kv.picture(host, `Timelines ${document.title}`);
  host.after(limits);

  // -- seconds of the selected range, or of the whole, by rank and kind

  const times = document.getElementById("times");
  const sums = kv.soon(() => {
    const { range } = chart.marked;
    const title = kv.el("p", { class: "lead" }, range ? `Seconds from ${kv.seconds(range[0])} to ${kv.seconds(range[1])}, ${kv.seconds(range[1] - range[0])} long. ` : "Seconds of the whole timelines. Drag over a part to sum that part.");
    if (range) {
      title.append(button("zoom-range", "Zoom to it", "Show the range alone", () => chart.to(...range)), " ", button("no-range", "Clear", "Sum the whole", () => chart.select(null)));
      times.closest("details").open = true;
    }
    times.replaceChildren(title, ...shown().map((index) => table(timelines[index], ...(range ?? [0, Infinity]))));
  });
  function table(timeline, from, until) {
    const all = new Map();
    const rows = Array.from({ length: timeline.ranks }, () => new Map());
    for (const lane of timeline.lanes) {
      for (let index = kvSpans.first(lane, from); index < lane.count && lane.start[index] < until; index += 1) {
        const { colour } = timeline.kinds[lane.kind[index]];
        const seconds = Math.max(0, Math.min(until, lane.end[index]) - Math.max(from, lane.start[index]));
        for (const row of [rows[lane.rank], all]) row.set(colour, (row.get(colour) ?? 0) + seconds);
      }
    }
    const used = data.legend.filter(([, variable]) => all.has(variable));
    const cells = [...rows.map((row, rank) => [timeline.rank_names[rank], rank, row]), ["all ranks", timeline.ranks, all]].map(([name, rank, row]) => [[name, rank],
      ...used.map(([, variable]) => [row.has(variable) ? kv.seconds(row.get(variable)) : "", row.get(variable) ?? ""])]);
    const caption = `Seconds of each rank in ${timeline.name}`;
    return kv.el("div", {}, kv.el("h3", { text: timeline.title }), kv.table(caption, [["rank", false], ...used.map(([words]) => [words, true])], cells));
  }
  const range = (act) => (text) => act(...text.split(",").map(Number));
  show();
  kv.view.keep("zoom", range((from, until) => chart.to(from, until)));
  kv.view.keep("range", range((from, until) => chart.select([from, until])));
});
