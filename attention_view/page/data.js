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
  data.layers = [...new Set(data.maps.map((map) => map.layer))];
  data.heads = [...new Set(data.maps.map((map) => map.head))];
  state.layer = data.layers[0];
  state.head = data.heads[0];
}

const mapOf = (layer, head, show) => data.index.get(`${layer}/${head}/${show}`);
const chosen = () => mapOf(state.layer, state.head, state.show);
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
  if (Number.isNaN(value)) return "NaN";
  if (value === 0) return "0";
  const digits = show.bits === 16 ? 3 : 2;
  return value < 1e-3 ? value.toExponential(digits - 1) : value.toPrecision(digits);
}

const CLASSES = ["both mask", "both allow", "only the first allows", "only the second allows", "several of these"];
const CLASS_COLOURS = [null, "#9aa5b1", "#0072b2", "#d55e00", "#cc79a7"];

// Colours of all codes of a show as bytes, computed once. Code 0 is transparent: the hatch is seen behind it.
const tables = new Map();
function coloursOf(showIndex) {
  const key = `${showIndex}/${state.scale}`;
  if (tables.has(key)) return tables.get(key);
  const show = data.shows[showIndex];
  const count = 2 ** show.bits;
  const table = new Uint32Array(count);
  const cache = new Map();
  for (let code = 1; code < count; code++) {
    const at = Math.round(255 * position(code, show));
    if (!cache.has(at)) cache.set(at, d3.rgb((show.kind === "difference" ? d3.interpolateInferno : d3.interpolateViridis)(at / 255)));
    let colour = cache.get(at);
    if (show.kind === "class") colour = d3.rgb(CLASS_COLOURS[code] || "#000");
    if (show.kind === "share" && code === 255) colour = d3.rgb("#2a788e");
    if (show.decades && code === count - 1) colour = d3.rgb("#ff00ff");
    table[code] = (255 << 24) | (colour.b << 16) | (colour.g << 8) | colour.r;
  }
  tables.set(key, table);
  return table;
}

// Where a code stands between 0 and 1 on the scale of colours.
function position(code, show) {
  if (show.kind === "class" || show.kind === "share") return code / 255;
  if (state.scale === "log") return Math.min(1, code / topOf(show));
  const value = valueOf(code, show) / valueOf(topOf(show), show);
  return Number.isNaN(value) ? 1 : Math.min(1, value);
}

// The code of the brightest colour: 1 for weights, and the largest of all differences.
function topOf(show) {
  const most = 2 ** show.bits - 2;
  if (show.kind !== "difference") return most;
  if (show.top === undefined) {
    show.top = 1;
    for (const map of data.maps) {
      if (data.shows[map.show] !== show) continue;
      for (const code of map.levels.at(-1).codes) if (code <= most) show.top = Math.max(show.top, code);
    }
  }
  return show.top;
}

// A level as an image of one pixel for each cell; the few that were used last are kept.
const images = new Map();
function imageOf(map, level) {
  const key = `${map.layer}/${map.head}/${map.show}/${state.scale}/${level.at}`;
  let canvas = images.get(key);
  if (canvas) return canvas;
  canvas = document.createElement("canvas");
  canvas.width = level.columns;
  canvas.height = level.rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(level.columns, level.rows);
  const pixels = new Uint32Array(image.data.buffer);
  const table = coloursOf(map.show);
  for (let i = 0; i < pixels.length; i++) pixels[i] = table[level.codes[i]];
  context.putImageData(image, 0, 0);
  images.set(key, canvas);
  if (images.size > 400) images.delete(images.keys().next().value);
  return canvas;
}

function codeAt(map, row, column) {
  const level = map.levels[0];
  return level.codes[Math.floor(row / level.block[0]) * level.columns + Math.floor(column / level.block[1])];
}

// Whether all weights of a query are 0: it may attend to no key. NaN is not 0.
function isEmpty(map, row) {
  const level = map.levels[0];
  const at = Math.floor(row / level.block[0]) * level.columns;
  for (let j = 0; j < level.columns; j++) if (level.codes[at + j]) return false;
  return true;
}

const nameOf = (side, index) => {
  const tokens = data.tokens[side];
  const word = side === 0 ? "query" : "key";
  return tokens ? `${word} ${index} “${tokens[index]}”` : `${word} ${index}`;
};

function change(changes) {
  Object.assign(state, changes);
  state.row = Math.max(0, Math.min(data.lengths[0] - 1, state.row));
  state.column = Math.max(0, Math.min(data.lengths[1] - 1, state.column));
  for (const listen of listeners) listen(changes);
}
