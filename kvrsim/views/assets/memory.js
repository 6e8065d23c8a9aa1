"use strict";
/* Memory of each rank against its limit, for the timelines that are shown. */
kv.ready((data) => {
  const host = document.getElementById("memory");
  if (!host) return;
  const { limit, limit_words: words, parts, of } = data.memory;
  const shade = (part) => `color-mix(in oklab, var(--accent) ${[100, 76, 56, 40, 28][part]}%, var(--faint))`;
  const names = data.timelines.map((timeline) => timeline.memory);
  const whose = (name) => { // a rank may stand for several GPUs, and memory is that of each
    const gpus = 1 + Math.max(...of[name].map(([, last]) => last));
    return data.timelines.some((timeline) => timeline.memory === name && timeline.ranks < gpus) ? "GPU" : "rank";
  };
  const sum = (sizes) => sizes.reduce((before, size) => before + size, 0);

  function row([first, last, sizes], most, what) {
    const total = sum(sizes);
    const bar = kv.el("div", { class: "bar", "aria-hidden": "true" });
    let before = 0;
    sizes.forEach((size, part) => {
      const piece = kv.el("span", { class: "part", title: `${parts[part]}: ${kv.bytes(size)}` });
      piece.style.left = `${(100 * before) / most}%`;
      piece.style.width = `${(100 * size) / most}%`;
      piece.style.background = shade(part);
      before += size;
      if (size) bar.append(piece);
    });
    const line = kv.el("span", { class: "limit", title: `limit ${words}` });
    line.style.left = `${(100 * limit) / most}%`;
    bar.append(line);
    const told = parts.map((part, index) => (sizes[index] ? `${part} ${kv.bytes(sizes[index])}` : "")).filter(Boolean).join(", ");
    return [
      kv.el("span", { class: "name", text: first === last ? `${what} ${first}` : `${what}s ${first} to ${last}` }), bar,
      kv.el("span", { class: total > limit ? "value bad" : "value" }, kv.bytes(total),
        kv.el("span", { class: "hidden", text: ` of ${words}: ${told}` })),
    ];
  }
  function show(chosen) {
    const shown = [...new Set(chosen.map((index) => names[index]))].filter((name) => of[name]);
    const most = 1.04 * Math.max(limit, ...shown.flatMap((name) => of[name].map(([, , sizes]) => sum(sizes))));
    const groups = shown.map((name) => kv.el("div", {},
      shown.length > 1 ? kv.el("h3", { text: name }) : null, kv.el("div", { class: "bars" }, ...of[name].flatMap((ranks) => row(ranks, most, whose(name))))));
    const legend = parts.map((part, index) => {
      const square = kv.el("span", { class: "chip", "aria-hidden": "true" });
      square.style.background = shade(index);
      return kv.el("li", {}, square, part);
    });
    host.replaceChildren(kv.el("ul", { class: "legend" }, ...legend), kv.el("div", { class: shown.length > 1 ? "pair" : "" }, ...groups));
    kv.picture(host, `Memory of ${shown.join(" and ")}`);
  }
  document.addEventListener("kv-shown", (event) => show(event.detail));
});
