// Attention in JavaScript, checked against the vectors: node attention.js. It needs no packages.
"use strict";
const fs = require("fs");
const path = require("path");

const FOLDER = path.join(__dirname, "..");
const KINDS = { BOOL: Uint8Array, F32: Float32Array, F64: Float64Array };

// The arrays of a file of safetensors: arrays[problem][name] = numbers in C order.
function read(file) {
  const bytes = fs.readFileSync(file);
  const start = 8 + Number(bytes.readBigUInt64LE(0));
  const arrays = {};
  for (const [key, entry] of Object.entries(JSON.parse(bytes.toString("utf8", 8, start)))) {
    const [problem, name] = key.split("/");
    const [first, last] = entry.data_offsets;
    const part = Uint8Array.from(bytes.subarray(start + first, start + last)); // aligned, as it is a copy
    (arrays[problem] ??= {})[name] = new KINDS[entry.dtype](part.buffer);
  }
  return arrays;
}

// Output, logsumexp and gradients in double precision, one query after the other. Masked keys are never read.
function attention({ sizes: { B, H, G, M, N, D, E }, scale, softcap }, { query, key, value, mask, bias, sinks, d_output }) {
  const zeros = (count) => new Float64Array(count);
  const found = { output: zeros(B * H * M * E), logsumexp: zeros(B * H * M), d_query: zeros(B * H * M * D) };
  Object.assign(found, { d_key: zeros(B * G * N * D), d_value: zeros(B * G * N * E) });
  Object.assign(found, { d_bias: zeros(B * H * M * N), d_sinks: zeros(H) });
  for (let row = 0; row < B * H * M; row++) {
    const head = Math.floor(row / M);
    const group = Math.floor(head / H) * G + Math.floor(((head % H) * G) / H);
    const scores = [], steepness = [], keys = [];
    for (let j = 0; j < N; j++) {
      const added = bias ? bias[row * N + j] : 0;
      if ((mask && !mask[row * N + j]) || added === -Infinity) continue;
      let score = 0;
      for (let d = 0; d < D; d++) score += scale * query[row * D + d] * key[(group * N + j) * D + d];
      const capped = softcap ? Math.tanh(score / softcap) : 0;
      keys.push(j);
      steepness.push(1 - capped * capped);
      scores.push((softcap ? softcap * capped : score) + added);
    }
    const sink = sinks ? sinks[head % H] : -Infinity;
    const largest = scores.reduce((a, b) => Math.max(a, b), sink);
    const shift = Number.isFinite(largest) ? largest : 0;
    const powers = scores.map((score) => Math.exp(score - shift));
    const total = powers.reduce((a, b) => a + b, Math.exp(sink - shift));
    found.logsumexp[row] = shift + Math.log(total);
    const weights = powers.map((power) => power / total);
    const d_weights = keys.map(() => 0);
    keys.forEach((j, index) => {
      for (let e = 0; e < E; e++) {
        const place = (group * N + j) * E + e;
        found.output[row * E + e] += weights[index] * value[place];
        if (!d_output) continue;
        d_weights[index] += d_output[row * E + e] * value[place];
        found.d_value[place] += weights[index] * d_output[row * E + e];
      }
    });
    if (!d_output) continue;
    const delta = weights.reduce((sum, weight, index) => sum + weight * d_weights[index], 0);
    if (sinks) found.d_sinks[head % H] -= (Math.exp(sink - shift) / total) * delta;
    keys.forEach((j, index) => {
      const d_score = (found.d_bias[row * N + j] = weights[index] * (d_weights[index] - delta));
      for (let d = 0; d < D; d++) {
        const place = (group * N + j) * D + d;
        found.d_query[row * D + d] += scale * steepness[index] * d_score * key[place];
        found.d_key[place] += scale * steepness[index] * d_score * query[row * D + d];
      }
    });
  }
  return found;
}

// Whether a number is near enough; NaN stands for any number that is not finite.
function isRight(got, expected, unit, bound) {
  if (Number.isNaN(expected)) return !Number.isFinite(got);
  return got === expected || Math.abs(got - expected) <= bound * unit;
}

for (const file of fs.readdirSync(FOLDER).filter((name) => name.endsWith(".safetensors"))) {
  const group = path.basename(file, ".safetensors");
  const { problems } = JSON.parse(fs.readFileSync(path.join(FOLDER, `${group}.json`), "utf8"));
  const arrays = read(path.join(FOLDER, file));
  const wrong = problems.filter((problem) => {
    const mine = arrays[problem.name];
    const results = attention(problem, mine);
    return Object.entries(problem.bounds).some(([name, { float64: bound }]) =>
      mine[name].some((expected, i) => !isRight(results[name][i], expected, mine[`${name}.unit`][i], bound)));
  });
  console.log([`${group}: ${problems.length - wrong.length} of ${problems.length}`, ...wrong.map(({ name }) => name)].join(" "));
  if (wrong.length) process.exitCode = 1;
}
