"use strict";
// The data of the page, and what a code stands for.
const state = { layer: 0, head: 0, show: 0, scale: "linear", row: 0, column: 0, view: null };
const listeners = [];
const byId = (id) => document.getElementById(id);
let data = null;

async function load() {
  const text = atob(byId("data").textContent);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const bytes = await new Response(stream).arrayBuffer();
  const length = new DataView(bytes).getUint32(0, true);
  data = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
  const codesOf = (level, bits) => {
    const kind = bits === 16 ? Uint16Array : Uint8Array;
    return new kind(bytes, 4 + length + level.at, level.rows * level.columns);
  };
  data.index = new Map();
  for (const map of data.maps) {
    for (const level of map.levels) level.codes = codesOf(level, data.shows[map.show].bits);
    data.index.set(`${map.layer}/${map.head}/${map.show}`, map);
  }
  if (data.blocks) data.blocks.codes = codesOf(data.blocks, 8);
  for (const map of data.maps) map.part = data.parts[map.part];
  state.row = data.query;
  data.layers = [...new Set(data.maps.map((map) => map.layer))];
  data.heads = [...new Set(data.maps.map((map) => map.head))];
  state.layer = data.layers[0];
  state.head = data.heads[0];
}

const mapOf = (layer, head, show) => data.index.get(`${layer}/${head}/${show}`);
const chosen = () => mapOf(state.layer, state.head, state.show);
const partOf = () => chosen().part;
const showOf = () => data.shows[state.show];
const isExact = () => chosen().levels[0].block[0] === 1 && chosen().levels[0].block[1] === 1;
function valueOf(code, show) {
  if (show.kind === "class") return code;
  if (show.kind === "share") return code / 255;
  const last = 2 ** show.bits - 1;
  if (code === 0) return 0;
  return code === last ? NaN : 10 ** (((code - 1) * show.decades) / (last - 2) - show.decades);
}

function told(code, show) {
  if (show.kind === "class") return CLASSES[code];
  const value = valueOf(code, show);
  if (show.kind === "share") return value === 0 ? "masked" : value === 1 ? "allowed" : `${Math.round(100 * value)} % allowed`;
  // The smallest code stands for all that is smaller, too.
  return (code === 1 ? "at most " : "") + written(value, show.bits === 16 ? 3 : 2);
}

// A number to so many digits.
function written(value, digits) {
  if (Number.isNaN(value)) return "NaN";
  if (value === 0) return "0";
  return value < 1e-3 ? value.toExponential(digits - 1) : value.toPrecision(digits);
}

const CLASSES = ["both mask", "both allow", "only the first allows", "only the second allows", "several of these"];
const ALLOWED = "#2a788e";
const CLASS_COLOURS = [null, "#9aa5b1", "#0072b2", "#d55e00", "#cc79a7"];

// What is the same for all maps is computed once.
const memo = new Map();
function once(key, compute) {
  if (!memo.has(key)) memo.set(key, compute());
  return memo.get(key);
}

// A function from codes of a map to colours as bytes. Code 0 is transparent: the hatch is seen behind it.
function painter(map, top = map.top) {
  const { kind, bits, decades } = data.shows[map.show];
  const ramp = rampOf(kind);
  if (kind === "class") return (code) => ramp[code];
  if (kind === "share") return (code) => (code === 0 ? 0 : code === 255 ? ALLOWED_BYTES : ramp[code]);
  const last = 2 ** bits - 1;
  const heights = heightsOf(data.shows[map.show]);
  const factor = 255 / heightOf(top, decades);
  return (code) => (code === 0 ? 0 : code === last ? NAN_BYTES : ramp[Math.min(255, Math.round(heights[code] * factor))]);
}

// The colours of all codes of the map that was painted last: as fast as a large image needs it.
let painting = {};
function tableOf(map) {
  const key = `${map.layer}/${map.head}/${map.show}/${state.scale}`;
  if (painting.key !== key) {
    const colour = painter(map);
    const { bits } = data.shows[map.show];
    painting = { key, colours: Uint32Array.from({ length: 2 ** bits }, (_, code) => colour(code)) };
  }
  return painting.colours;
}

// How far above the start of the scale a number stands: above 0, or above the smallest code of a logarithmic scale.
const heightOf = (value, decades) => (state.scale === "log" ? Math.max(1e-9, Math.log10(value) + decades) : value);
const heightsOf = (show) => once(`${show.bits}/${state.scale}`, () => Float64Array.from({ length: 2 ** show.bits }, (_, code) => heightOf(valueOf(code, show), show.decades)));
const interpolated = (kind) => (kind === "difference" ? d3.interpolateInferno : d3.interpolateViridis);
const rampOf = (kind) => once(kind, () => (kind === "class" ? Uint32Array.from(CLASS_COLOURS, (each) => (each ? bytesOf(each) : 0)) : Uint32Array.from({ length: 256 }, (_, i) => bytesOf(interpolated(kind)(i / 255)))));

function bytesOf(text) {
  const { r, g, b } = d3.rgb(text);
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}
const [NAN, ZERO] = ["#ff00ff", "#202020"];
const [ALLOWED_BYTES, NAN_BYTES, ZERO_BYTES] = [ALLOWED, NAN, ZERO].map(bytesOf);

// Some cells of a level as an image, one pixel each.
const held = document.createElement("canvas");
function imageOf(map, level, rows, columns) {
  const [width, height] = [columns[1] - columns[0], rows[1] - rows[0]];
  return painted(width, height, (pixels) => {
    const colour = map === chosen() ? null : painter(map);
    const table = colour ? null : tableOf(map);
    for (let i = 0, at = 0; i < height; i++) {
      const start = (rows[0] + i) * level.columns + columns[0];
      for (let j = 0; j < width; j++) pixels[at++] = table ? table[level.codes[start + j]] : colour(level.codes[start + j]);
    }
  });
}

function painted(width, height, paint) {
  held.width = width;
  held.height = height;
  const context = held.getContext("2d");
  const image = context.createImageData(width, height);
  paint(new Uint32Array(image.data.buffer));
  context.putImageData(image, 0, 0);
  return held;
}

// The code of the cell of a pair.
function codeAt(map, row, column) {
  const { block, columns, codes } = map.levels[0];
  return codes[Math.floor(row / block[0]) * columns + Math.floor(column / block[1])];
}

// Whether all weights of a query are 0: it may attend to no key. NaN is not 0.
function isEmpty(map, row) {
  const level = map.levels[0];
  const at = Math.floor(row / level.block[0]) * level.columns;
  for (let j = 0; j < level.columns; j++) if (level.codes[at + j]) return false;
  return true;
}

const nameOf = (side, index) => {
  const tokens = partOf().tokens[side];
  const word = side === 0 ? "query" : "key";
  const name = data.picture ? placeOf(side, index) : `${word} ${index}`;
  return tokens ? `${name} “${shortened(tokens[index], 60)}”` : name;
};

// Where a query or key is on the picture.
function placeOf(side, index) {
  const { places, class_tokens, grid, key_grid: keys } = data.picture;
  const [at, columns] = side ? [index - class_tokens, keys[1]] : [places[index], grid[1]];
  return `${side ? "key" : "query"} ${at < 0 ? "before the patches" : `at row ${Math.floor(at / columns)}, column ${at % columns}`}`;
}

// A text of some characters at most, none of them cut in two.
function shortened(text, most) {
  const characters = [...text.slice(0, 2 * most + 2)];
  return characters.length > most ? `${characters.slice(0, most - 1).join("")}…` : text;
}

function change(changes) {
  const before = chosen()?.part;
  Object.assign(state, changes);
  if (!chosen()) {
    // Layers may have other numbers of heads: what was not asked for gives way.
    const asked = "layer" in changes ? "layer" : "head";
    const { layer, head } = data.maps.findLast((map) => map[asked] === state[asked]);
    Object.assign(state, { layer, head });
    changes = { ...changes, layer, head };
  }
  const { lengths } = partOf();
  state.row = Math.max(0, Math.min(lengths[0] - 1, state.row));
  state.column = Math.max(0, Math.min(lengths[1] - 1, state.column));
  if (partOf() !== before) changes = { ...changes, part: true };
  for (const listen of listeners) listen(changes);
}
