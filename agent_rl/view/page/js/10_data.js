// Where data comes from: blocks of the file, or a server that is asked. Both give the same JSON.

/** The JSON of a block: base64 of gzip. */
async function inflate(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`this page has no block ${id}`);
  const packed = Uint8Array.from(atob(element.textContent), (char) => char.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

/** Numbers that Python packed: base64 of little-endian values; float16 becomes Float32Array. */
function unpack(text, kind) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  if (kind !== "float16") return new { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array }[kind](bytes.buffer);
  const halves = new Uint16Array(bytes.buffer);
  return Float32Array.from(halves, (half) => {
    const sign = half & 0x8000 ? -1 : 1, exponent = (half >> 10) & 31, fraction = half & 1023;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : fraction * 2 ** -24);
  });
}

function remembered(make, most = 64) {
  const kept = new Map();
  const get = (key) => {
    if (!kept.has(key)) {
      if (kept.size >= most) kept.delete(kept.keys().next().value);
      const made = make(key);
      kept.set(key, made);
      made.catch(() => kept.delete(key));
    }
    return kept.get(key);
  };
  get.forget = () => kept.clear();
  return get;
}

const embedded = {
  run: remembered(() => inflate("run")),
  heads: remembered(() => inflate("heads")),
  metrics: remembered(() => inflate("metrics")),
  episode: remembered(async (id) => {
    const at = (await source.heads()).id.indexOf(id);
    if (at < 0) throw new Error(`there is no episode ${id} in this page`);
    return inflate(`episode-${at}`);
  }),
  select: null,  // a list searches heads only
  onchange: () => () => {},  // a file doesn't
};

