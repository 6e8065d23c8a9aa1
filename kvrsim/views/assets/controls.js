"use strict";
/* Controls that pages share: a slider over given values, a choice of one, switches of many, and what a chart says in words.
 *
 * kv.slider({label, values, format, at, moved})   a range over the indices of `values`; returns {box, set(index),
 *                                                 values(others, index)}
 * kv.choice({label, options, chosen, changed})    buttons of which one is pressed; options: [[key, text], ...]
 * kv.switches({label, options, switched})         buttons that are on or off; options: [{key, text, colour}]; returns
 *                                                 {box, note(key, text)}; `switched` hears the set of keys that are on
 * kv.list(columns, rows, about)                   a table; columns: [{title, number, second}], rows: {cells, on, class}
 */
kv.slider = ({ label, values, format, at, moved }) => {
  const shown = kv.el("output", {});
  const input = kv.el("input", { type: "range", min: 0, max: values.length - 1, step: 1, "aria-label": label });
  const told = () => {
    const words = format(values[input.value], Number(input.value));
    shown.textContent = words;
    kv.view.set(kv.plain(label), input.value);
    input.setAttribute("aria-valuetext", words);
  };
  input.value = at;
  const changed = () => {
    told();
    moved(Number(input.value));
  };
  input.addEventListener("input", changed);
  told();
  kv.view.keep(kv.plain(label), (index) => {
    input.value = index;
    changed();
  });
  const box = kv.el("label", { class: "slider" }, kv.el("span", { text: label }), input, shown);
  box.hidden = values.length < 2;
  return {
    box,
    set(index) {
      if (Number(input.value) === index) return;
      input.value = index;
      told();
    },
    values(others, index) {
      values = others;
      input.max = others.length - 1;
      input.value = index;
      told();
    },
  };
};

kv.choice = ({ label, options, chosen, changed }) => {
  const buttons = options.map(([key, text]) => kv.el("button", {
    type: "button", text, dataset: { key }, "aria-pressed": String(key === chosen),
    on: { click: () => {
      for (const one of buttons) one.setAttribute("aria-pressed", String(one.dataset.key === key));
      kv.view.set(kv.plain(label), key);
      changed(key);
    } },
  }));
  kv.view.keep(kv.plain(label), (key) => buttons.find((one) => one.dataset.key === key)?.click());
  return kv.el("div", { class: "group", role: "group", "aria-label": label }, kv.el("span", { class: "group-name", text: label }), ...buttons);
};

kv.switches = ({ label, options, switched }) => {
  const on = new Set(options.map((one) => one.key));
  const notes = new Map();
  const buttons = new Map(options.map(({ key, text, colour, title }) => {
    const note = kv.el("span", { class: "count" });
    notes.set(key, note);
    return [key, kv.el("button", { type: "button", class: "series", title, dataset: { key }, "aria-pressed": "true", on: { click: () => turn(key) } },
      kv.chip(colour), text, note)];
  }));
  function apply() {
    for (const [key, button] of buttons) button.setAttribute("aria-pressed", String(on.has(key)));
    const off = [...buttons.keys()].filter((key) => !on.has(key));
    kv.view.set(`no-${kv.plain(label)}`, off.length ? off.join() : null);
    switched(on);
  }
  function turn(key) {
    if (!on.delete(key)) on.add(key);
    apply();
  }
  kv.view.keep(`no-${kv.plain(label)}`, (off) => {
    for (const key of buttons.keys()) if (off.split(",").includes(String(key))) on.delete(key);
    apply();
  });
  const every = (text, wanted) => kv.el("button", { type: "button", class: "every", text, on: { click: () => {
    for (const key of buttons.keys()) if (wanted) on.add(key); else on.delete(key);
    apply();
  } } });
  const box = kv.el("div", { class: "switches", role: "group", "aria-label": label }, ...buttons.values(), every("All", true), every("None", false));
  return { box, turn, on, note: (key, text) => { notes.get(key).textContent = text; } };
};

kv.list = (columns, rows, { caption, ident }) => {
  const named = (column) => [column.number ? "number" : "", column.second ? "second" : ""].join(" ").trim() || undefined;
  const heads = columns.map((column) => kv.el("th", { scope: "col", class: named(column), text: column.title, title: column.hint }));
  const lines = rows.map((row) => kv.el("tr", { class: row.class, dataset: row.dataset ?? {}, on: row.on ?? {} },
    ...row.cells.map((cell, index) => kv.el("td", { class: named(columns[index]) }, cell))));
  const whole = kv.el("table", { id: ident }, kv.el("caption", { class: "hidden", text: caption }),
    kv.el("thead", {}, kv.el("tr", {}, ...heads)), kv.el("tbody", {}, ...lines));
  return kv.inBox(whole);
};
