// The Prometheus text format, as far as this server writes it, and what can be said of two readings of it.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;

/** {name: sum over labels} of plain samples, and {name: Map(bound -> count)} of histograms' buckets. */
export function parse(text) {
  const values = {};
  const buckets = {};
  for (const line of text.split("\n")) {
    const [, name, labels, number] = LINE.exec(line) ?? [];
    if (name === undefined) continue;
    const bound = /(?:^|,)le="([^"]+)"/.exec(labels ?? "")?.[1];
    if (bound === undefined) values[name] = (values[name] ?? 0) + Number(number);
    else (buckets[name.slice(0, -"_bucket".length)] ??= new Map()).set(bound === "+Inf" ? Infinity : Number(bound), Number(number));
  }
  return { values, buckets };
}

/** How much a counter grew; null where the server was started anew in between. */
export function growth(before, now, name) {
  const grown = (now.values[name] ?? 0) - (before.values[name] ?? 0);
  return grown < 0 ? null : grown;
}

/** The mean of what a histogram observed between two readings; null where that was nothing. */
export function meanBetween(before, now, name) {
  const count = growth(before, now, `${name}_count`);
  return count ? growth(before, now, `${name}_sum`) / count : null;
}

/** A quantile of what a histogram observed in between, evenly spread within a bucket as Prometheus has it; or null. */
export function quantileBetween(before, now, name, share) {
  const old = before.buckets[name] ?? new Map();
  const bounds = [...(now.buckets[name] ?? new Map())].sort(([a], [b]) => a - b);
  const grown = bounds.map(([bound, count]) => [bound, count - (old.get(bound) ?? 0)]);
  const total = grown.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  const wanted = share * total;
  let [low, below] = [0, 0];
  for (const [bound, count] of grown) {
    if (count >= wanted) return bound === Infinity ? low : low + ((bound - low) * (wanted - below)) / Math.max(count - below, 1e-12);
    [low, below] = [bound, count];
  }
  return low;
}
