"use strict";
/* The page of timelines: which two are shown, their tools and legend, and their times as a table. */
kv.ready((data) => {
  const host = document.getElementById("gantt");
  if (!host) return;
  const timelines = data.timelines.map(kvSpans.decode);
  const WAITS = "--op-waiting";
  const labels = new Map(data.legend.map(([words, variable]) => [variable, words]));
  const chart = kvGantt(host, {
    label: `Timelines of ${timelines.map((one) => one.name).join(", ")}. Arrow keys go from operation to operation, plus and`
      + " minus zoom, 0 shows all. The table below holds the same times.",
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
    const select = kv.el("select", { id: ident, on: { change: show } }, ...options);
    return [select, kv.el("label", {}, label, select)];
  }
  const [above, aboveLabel] = chooser("Above", "above", 0);
  const [below, belowLabel] = chooser("Below", "below", timelines.length > 1 ? 1 : -1);
  function show() {
    const chosen = [above, below].map((select) => Number(select.value)).filter((index) => index >= 0);
    chart.show(chosen.map((index) => timelines[index]));
    document.dispatchEvent(new CustomEvent("kv-shown", { detail: chosen }));
    explain(chosen.map((index) => timelines[index]));
    times.replaceChildren(...chosen.map((index) => table(timelines[index])));
  }
  const button = (id, text, title, clicked) => kv.el("button", { id, type: "button", text, title, "aria-label": title, on: { click: clicked } });
  host.before(kv.el("div", { class: "tools" }, ...(timelines.length > 1 ? [aboveLabel, belowLabel] : []),
    kv.el("span", { class: "group" }, button("zoom-in", "+", "Zoom in", () => chart.zoom(2)),
      button("zoom-out", "−", "Zoom out", () => chart.zoom(0.5)), button("zoom-all", "All", "Show all", chart.all))));
  const legend = kv.el("ul", { class: "legend" });
  host.after(legend);
  function explain(shown) {
    const used = new Set(shown.flatMap((timeline) => timeline.kinds.map((kind) => kind.colour)));
    const items = data.legend.filter(([, variable]) => used.has(variable));
    legend.replaceChildren(...items.map(([words, variable]) => kv.el("li", {}, kv.chip(variable), words)));
  }

  // -- the same times as a table: a row a rank, a column a colour

  const times = document.getElementById("times");
  function table(timeline) {
    const rows = Array.from({ length: timeline.ranks }, () => new Map());
    for (const lane of timeline.lanes) {
      for (let index = 0; index < lane.count; index += 1) {
        const { colour } = timeline.kinds[lane.kind[index]];
        rows[lane.rank].set(colour, (rows[lane.rank].get(colour) ?? 0) + lane.end[index] - lane.start[index]);
      }
    }
    const used = data.legend.filter(([, variable]) => rows.some((row) => row.has(variable)));
    const cells = rows.map((row, rank) => [[timeline.rank_names[rank], rank],
      ...used.map(([, variable]) => [row.has(variable) ? kv.seconds(row.get(variable)) : "", row.get(variable) ?? ""])]);
    const caption = `Seconds of each rank in ${timeline.name}`;
    return kv.el("div", {}, kv.el("h3", { text: timeline.title }), kv.table(caption, [["rank", false], ...used.map(([words]) => [words, true])], cells));
  }
  show();
});
