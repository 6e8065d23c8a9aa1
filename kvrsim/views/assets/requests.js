"use strict";
/* TTFT and queue of several requests, in the order of their arrival. */
kv.ready((data) => {
  const host = document.getElementById("requests");
  if (!host) return;
  const { arrival_s: arrivals, ttft_s: ttfts, queue_s: queues, context_len: lengths } = data.requests;
  const numbers = ttfts.map((_, index) => index + 1);
  kv.chart(host, {
    label: `TTFT of ${numbers.length} requests in the order of their arrival; the table below holds them`,
    height: 260, x: { title: "request", format: (value) => (Number.isInteger(value) ? String(value) : "") }, y: { format: kv.seconds, least: 0 },
    xs: numbers,
    series: [{ name: "TTFT", colour: data.colour, values: ttfts, points: numbers.length <= 200 },
      { name: "waits in the queue", colour: "--dim", values: queues, dash: [5, 4], points: false }],
    hover: (index) => [`request ${index + 1}`, [["arrives", kv.seconds(arrivals[index])], ["tokens", String(lengths[index])],
      ["waits in the queue", kv.seconds(queues[index])], ["TTFT", kv.seconds(ttfts[index])]]],
  });
  const rows = ttfts.map((ttft, index) => [[String(index + 1), index], [kv.seconds(arrivals[index]), arrivals[index]],
    [String(lengths[index]), lengths[index]], [kv.seconds(queues[index]), queues[index]], [kv.seconds(ttft), ttft]]);
  const columns = [["request", true], ["arrives", true], ["tokens", true], ["waits in the queue", true], ["TTFT", true]];
  host.after(kv.el("details", {}, kv.el("summary", { text: "The requests as a table" }), kv.table("Requests", columns, rows)));
});
