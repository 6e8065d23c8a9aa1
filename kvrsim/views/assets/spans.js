"use strict";
/* Timelines as a page holds them, made into arrays; what is under a point; lanes as rows of pixels.
 *
 * kvSpans.decode(packed)                 a timeline with lanes; each lane has start, end (seconds), kind, layer
 * kvSpans.first(lane, time)              the first span of a lane that may end after `time`
 * kvSpans.at(lane, time, slack)          the span at a time, or the nearest within `slack` seconds; -1: none
 * kvSpans.path(timeline)                 the critical path, from the end to the beginning: [{place, index, seconds}], place: of
 *                                        the lane; seconds: by which it delays what follows, together the TTFT
 * kvSpans.raster(lane, from, to, pixels, colours)   fills RGBA pixels: each has the mean colour of what it covers
 */
const kvSpans = (() => {
  function decode(packed) {
    const lanes = packed.lanes.map((held) => {
      const count = held.kind.length;
      const start = new Float64Array(count);
      const end = new Float64Array(count);
      const latest = new Float64Array(count); // of the ends so far: links may carry messages beside each other
      let clock = 0;
      let last = 0;
      for (let index = 0; index < count; index += 1) {
        const begin = clock + held.gap[index];
        clock = begin + held.ticks[index];
        start[index] = begin * packed.tick_s;
        end[index] = clock * packed.tick_s;
        latest[index] = last = Math.max(last, end[index]);
      }
      return {
        rank: held.rank, link: held.link, count, start, end, latest,
        kind: Uint32Array.from(held.kind), layer: Int32Array.from(held.layer),
      };
    });
    return { ...packed, lanes, count: lanes.reduce((sum, lane) => sum + lane.count, 0) };
  }

  function first(lane, time) {
    let low = 0;
    let high = lane.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (lane.latest[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  function at(lane, time, slack) {
    let best = -1;
    let distance = slack;
    for (let index = first(lane, time - slack); index < lane.count && lane.start[index] <= time + slack; index += 1) {
      const away = Math.max(lane.start[index] - time, time - lane.end[index], 0);
      if (away === 0) return index;
      if (away < distance) [best, distance] = [index, away];
    }
    return best;
  }

  const WAITS = "--op-waiting";

  /* Each step goes to what ended last before the rank or the message could begin. */
  function path(timeline) {
    const { lanes, ranks, kinds } = timeline;
    const slack = 3 * timeline.tick_s; // of rounding
    const stream = Array.from({ length: ranks }, (_, rank) => lanes.findIndex((lane) => lane.rank === rank && !lane.link));
    const messages = Array.from({ length: ranks }, () => []); // that a rank sends or receives, by their end
    lanes.forEach((lane, place) => lane.link && lane.kind.forEach((kind, index) => {
      for (const rank of new Set([lane.rank, kinds[kind].peer ?? lane.rank])) messages[rank].push({ place, index });
    }));
    const end = (one) => (one ? lanes[one.place].end[one.index] : -1);
    const start = (one) => lanes[one.place].start[one.index];
    for (const some of messages) some.sort((one, other) => end(one) - end(other));
    const later = (...some) => some.reduce((best, one) => (end(one) > end(best) + slack ? one : best), null);

    const peer = (one) => kinds[lanes[one.place].kind[one.index]].peer;
    function message(rank, time, before, isMeant = () => true) { // the last one that has ended, and began earlier
      let low = 0;
      let high = messages[rank].length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (end(messages[rank][middle]) > time + slack) high = middle;
        else low = middle + 1;
      }
      for (low -= 1; low >= 0; low -= 1) {
        const one = messages[rank][low];
        if (start(one) < before && isMeant(one)) return one;
      }
      return null;
    }
    function work(rank, time, before) { // what held the rank's stream until then
      const lane = lanes[stream[rank]];
      let index = lane ? Math.min(lane.count, first(lane, time + slack)) - 1 : -1;
      while (index >= 0 && lane.start[index] >= before) index -= 1;
      if (index < 0) return null;
      const one = { place: stream[rank], index };
      const kind = kinds[lane.kind[index]];
      if (kind.colour !== WAITS || kind.name === "host") return one;
      const [, way, other] = kind.name.match(/(from|to) rank (\d+)/) ?? [];
      const held = message(rank, end(one), before, (sent) => !way || Number(other) === (way === "to" ? peer(sent) : lanes[sent.place].rank));
      return end(held) > start(one) ? held : one;
    }
    const found = [];
    let until = timeline.first_tokens_s[0];
    let one = work(ranks - 1, until, Infinity);
    while (one) {
      const before = start(one);
      found.push({ ...one, seconds: until - before });
      until = before;
      const { rank, link } = lanes[one.place];
      one = later(work(rank, before, before), link && message(rank, before, before), link && work(peer(one) ?? rank, before, before));
    }
    return found;
  }

  let sums = new Float32Array(0);

  function raster(lane, from, to, pixels, colours) {
    const width = pixels.length / 4;
    if (sums.length !== width * 4) sums = new Float32Array(width * 4);
    else sums.fill(0);
    const scale = width / (to - from);
    const { start, end, kind, layer } = lane;
    for (let index = first(lane, from); index < lane.count && start[index] < to; index += 1) {
      const left = Math.max(0, (start[index] - from) * scale);
      const right = Math.min(width, (end[index] - from) * scale);
      if (right <= left) continue;
      const shade = 3 * (2 * kind[index] + (layer[index] & 1 && layer[index] > 0 ? 1 : 0));
      const red = colours[shade];
      const green = colours[shade + 1];
      const blue = colours[shade + 2];
      const begin = Math.floor(left);
      const finish = Math.min(width - 1, Math.floor(right));
      for (let pixel = begin; pixel <= finish; pixel += 1) {
        const part = Math.min(right, pixel + 1) - Math.max(left, pixel);
        const place = 4 * pixel;
        sums[place] += part * red;
        sums[place + 1] += part * green;
        sums[place + 2] += part * blue;
        sums[place + 3] += part;
      }
    }
    for (let place = 0; place < pixels.length; place += 4) {
      const part = sums[place + 3];
      if (part <= 0) {
        pixels[place + 3] = 0;
        continue;
      }
      pixels[place] = sums[place] / part;
      pixels[place + 1] = sums[place + 1] / part;
      pixels[place + 2] = sums[place + 2] / part;
      pixels[place + 3] = 255 * Math.min(1, 0.2 + part); // so that a short message among none is seen
    }
  }

  return { decode, first, at, path, raster };
})();
