"use strict";
/* The page of timelines: which two are shown, their legend, their tools, and memory against its limit. */
kv.ready((data) => {
  const host = document.getElementById("gantt");
  if (!host) return;
  const timelines = data.timelines.map(kvSpans.decode);
  const waits = (kind) => kind.colour === "--op-waiting";
  const chart = kvGantt(host, {
    label: `Timelines of ${data.timelines.map((one) => one.name).join(" and ")}. Arrow keys go from operation to operation,`
      + " plus and minus zoom, 0 shows all. The tables on this page hold the same times.",
    describe(timeline, lane, index) {
      const kind = timeline.kinds[lane.kind[index]];
      const wait = waits(kind);
      return [wait ? `waits: ${kind.name}` : kind.name, [
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

  function chooser(label, none, chosen) {
    const options = timelines.map((one, index) => kv.el("option", { value: index, text: one.name, selected: index === chosen }));
    if (none) options.unshift(kv.el("option", { value: -1, text: "nothing", selected: chosen < 0 }));
    const select = kv.el("select", { on: { change: show } }, ...options);
    return [select, kv.el("label", {}, label, select)];
  }
  const [above, aboveLabel] = chooser("Above", false, 0);
  const [below, belowLabel] = chooser("Below", true, timelines.length > 1 ? 1 : -1);
  function show() {
    chart.show([above.value, below.value].map(Number).filter((index) => index >= 0).map((index) => timelines[index]));
    document.dispatchEvent(new CustomEvent("kv-shown", { detail: [above.value, below.value].map(Number) }));
  }
  const button = (text, title, clicked) => kv.el("button", { type: "button", text, title, "aria-label": title, on: { click: clicked } });
  const choices = timelines.length > 1 ? [aboveLabel, belowLabel] : [];
  host.before(kv.el("div", { class: "tools" }, ...choices, kv.el("span", { class: "group" },
    button("+", "Zoom in", () => chart.zoom(2)), button("−", "Zoom out", () => chart.zoom(0.5)), button("All", "Show all", chart.all))));
  const legend = data.legend.map(([words, variable]) => kv.el("li", {}, kv.chip(variable), words));
  host.after(kv.el("ul", { class: "legend" }, ...legend));
  show();
});
