"use strict";
/* Who wins where, among the strategies that are on: the rules of StrategyMap in planner/map/map.py.
 *
 * kvWinners(data) returns {place(b, c, g), at(place, on), all(on)}; at: {best, second, ties, lead, gpu_s, ranked}, or null
 * where none of them fits. The fastest that fits wins. One GPU wins where a prediction cannot tell it
 * from the fastest.
 */
function kvWinners(data) {
  const { strategies, contexts, gpus, bandwidths, alone } = data;
  const count = bandwidths.length * contexts.length * gpus.length;
  const ties = data.ties.map((pairs) => {
    const found = new Map();
    for (const [faster, slower] of pairs) (found.get(faster) ?? found.set(faster, new Set()).get(faster)).add(slower);
    return found;
  });

  function at(place, on) {
    const ttft = (index) => strategies[index].ttft_s[place];
    const here = strategies.map((_, index) => index).filter((index) => on.has(index) && ttft(index) !== null);
    const ranked = here.sort((a, b) => ttft(a) - ttft(b));
    const usable = ranked.filter((index) => strategies[index].fits[place]);
    if (!usable.length) return null;
    const [fastest] = usable;
    const tied = ties[place].get(fastest) ?? new Set();
    const near = usable.filter((index) => index === fastest || tied.has(index));
    const best = near.includes(alone) ? alone : fastest;
    const second = usable.find((index) => index !== best) ?? null;
    return {
      best, second, ranked, near,
      ties: near.filter((index) => index !== best),
      lead: second === null ? null : Math.max(0, ttft(second) / ttft(best) - 1),
      gpu_s: ttft(best) * (best === alone ? 1 : gpus[place % gpus.length]),
    };
  }
  return {
    count, at,
    place: (b, c, g) => (b * contexts.length + c) * gpus.length + g,
    all: (on) => Array.from({ length: count }, (_, place) => at(place, on)),
  };
}
