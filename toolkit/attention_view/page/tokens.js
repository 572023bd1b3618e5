// Tokens of queries at the left and of keys at the right, with a line for each weight of the chosen token.
const MOST_TOKENS = 1024;
const LINE = 20;
const lines = { side: 0 };

function makeTokens() {
  listeners.push(({ part }) => {
    if (part) writeTokens();
    if (!byId("tokens").hidden) drawTokens();
  });
}

// The tokens of the chosen layer, as far as they are known and not too many.
function writeTokens() {
  const { lengths, tokens, dimmed: allDimmed } = partOf();
  byId("lines").replaceChildren();
  byId("tokens").hidden = !tokens[0] || !tokens[1] || !isExact() || Math.max(...lengths) > MOST_TOKENS;
  if (byId("tokens").hidden) return;
  const height = LINE * Math.max(...lengths) + 24;
  const svg = d3.select("#lines").append("svg").attr("viewBox", `0 0 460 ${height}`).attr("role", "group")
    .attr("aria-label", "tokens: queries at the left look at keys at the right");
  svg.append("text").attr("x", 130).attr("y", 14).attr("text-anchor", "end").text("query looks at →");
  svg.append("text").attr("x", 330).attr("y", 14).text("key");
  svg.append("g").attr("class", "paths");
  for (const side of [0, 1]) {
    const dimmed = new Set(allDimmed[side]);
    const group = svg.append("g").selectAll("g").data(tokens[side]).join("g")
      .attr("class", (_, i) => `token${dimmed.has(i) ? " dimmed" : ""}`)
      .attr("data-side", side).attr("data-index", (_, i) => i)
      .attr("tabindex", (_, i) => (i ? -1 : 0)).attr("role", "button")
      .attr("transform", (_, i) => `translate(${side ? 320 : 0},${24 + i * LINE})`)
      .on("pointerenter focus", (event) => choose(side, Number(event.currentTarget.dataset.index)))
      .on("click", (event) => event.currentTarget.focus())
      .on("keydown", moveFocus);
    group.append("rect").attr("width", 140).attr("height", LINE - 1).attr("rx", 3);
    group.append("text").attr("x", side ? 8 : 132).attr("y", 14).attr("text-anchor", side ? "start" : "end")
      .text((token) => shortened(token, 18))
      .filter((token) => token.length > 9).each(fit);
  }
}

// Leave characters out until a token is no wider than its place.
function fit(token) {
  for (let most = 17; most > 1 && this.getComputedTextLength() > 126; most--) this.textContent = shortened(token, most);
}

function choose(side, index) {
  if (lines.side === side && state[side ? "column" : "row"] === index) return;
  lines.side = side;
  // The key that is looked at most, or the query that looks most, is named in the readout.
  const map = chosen();
  const weights = weightsOf(map, side, index);
  const other = d3.maxIndex(weights, (weight) => (Number.isNaN(weight) ? 2 : weight));
  change(side ? { column: index, row: other } : { row: index, column: other });
}

function weightsOf(map, side, index) {
  const { rows, columns, codes } = map.levels[0];
  const show = data.shows[map.show];
  return side
    ? d3.range(rows).map((i) => valueOf(codes[i * columns + index], show))
    : d3.range(columns).map((j) => valueOf(codes[index * columns + j], show));
}

function moveFocus(event) {
  const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  const { side, index } = event.currentTarget.dataset;
  const aside = { ArrowLeft: 0, ArrowRight: 1 }[event.key];
  const to = [aside ?? side, step ? Number(index) + step : index];
  const next = byId("lines").querySelector(`[data-side="${to[0]}"][data-index="${to[1]}"]`);
  if (step === undefined && aside === undefined) return;
  event.preventDefault();
  event.stopPropagation();
  if (next) next.focus();
}

function drawTokens() {
  const map = chosen();
  const side = lines.side;
  const index = side ? state.column : state.row;
  const weights = weightsOf(map, side, index);
  const { top } = map;
  byId("lines-legend").textContent = `Lines and boxes: from 0 to ${written(top, 3)}`;
  const y = (i) => 24 + i * LINE + LINE / 2;
  const drawn = weights.map((weight, i) => ({ weight, i })).filter(({ weight }) => Number.isNaN(weight) || weight / top > 0.002);
  d3.select("#lines .paths").selectAll("path").data(drawn).join("path")
    .attr("d", ({ i }) => {
      const [from, to] = side ? [i, index] : [index, i];
      return `M140,${y(from)} C220,${y(from)} 240,${y(to)} 320,${y(to)}`;
    })
    .style("stroke", ({ weight }) => (Number.isNaN(weight) ? "#ff00ff" : null))
    .attr("stroke-width", ({ weight }) => 0.6 + (5 * (weight || 0)) / top)
    .attr("opacity", ({ weight }) => (Number.isNaN(weight) ? 1 : 0.12 + (0.88 * weight) / top));
  const compared = showOf().kind === "difference";
  d3.selectAll("#lines g.token").each(function (token) {
    const [own, i] = [Number(this.dataset.side), Number(this.dataset.index)];
    const node = d3.select(this);
    const isChosen = own === side && i === index;
    const empty = own === 0 && !compared && isEmpty(map, i);
    node.attr("aria-pressed", String(isChosen)).classed("empty", empty);
    const weight = own === side ? 0 : weights[i];
    node.select("rect").style("fill", own === side || !(weight > 0) ? null : "var(--one)").style("fill-opacity", (0.55 * (weight || 0)) / top);
    node.attr("aria-label", nameOf(own, i) + (empty ? ", fully masked" : "") + (own === side ? "" : `, ${written(weight, showOf().bits === 16 ? 3 : 2)}`));
  });
}
