// Heads × layers, one small map each; controls; and what the readout says.
function makeOverview() {
  const fill = (id, values, name) => {
    for (const value of values) byId(id).append(new Option(name(value), value));
    byId(id).parentElement.hidden = values.length < 2;
    byId(id).addEventListener("change", (event) => change({ [id]: Number(event.target.value) }));
  };
  const sizeOf = (layer) => data.maps.find((map) => map.layer === layer).part.lengths.join(" × ");
  fill("layer", data.layers, data.parts.length > 1 ? (layer) => `${layer}: ${sizeOf(layer)}` : String);
  fill("head", data.heads, String);
  fill("show", data.shows.map((_, i) => i), (i) => data.shows[i].name);
  byId("scale").addEventListener("change", (event) => change({ scale: event.target.value }));
  byId("scale").parentElement.hidden = !data.shows.some((show) => show.decades);
  byId("blocks-label").hidden = !data.blocks;
  byId("blocks").addEventListener("change", () => change({}));
  byId("notes").replaceChildren(...data.notes.map((note) => Object.assign(document.createElement("li"), { textContent: note })));
  const count = data.layers.length * data.heads.length;
  byId("overview").hidden = count < 2;
  if (count < 2) return listeners.push(showControls, showReadout, showLegend);
  const grid = byId("grid");
  grid.style.gridTemplateColumns = `repeat(${data.heads.length}, auto)`;
  for (const layer of data.layers) {
    for (const head of data.heads) {
      if (!mapOf(layer, head, 0)) { grid.append(document.createElement("span")); continue; }
      const button = document.createElement("button");
      button.type = "button";
      button.dataset.layer = layer;
      button.dataset.head = head;
      button.setAttribute("aria-label", `layer ${layer}, head ${head}`);
      button.append(document.createElement("canvas"));
      button.addEventListener("click", () => change({ layer, head }));
      grid.append(button);
    }
  }
  listeners.push(drawOverview, showControls, showReadout, showLegend);
}

function drawOverview(changes) {
  for (const button of byId("grid").querySelectorAll("button")) {
    const [layer, head] = [Number(button.dataset.layer), Number(button.dataset.head)];
    const isChosen = layer === state.layer && head === state.head;
    button.setAttribute("aria-pressed", String(isChosen));
    if (isChosen && ("layer" in changes || "head" in changes)) bringIntoSight(button);
    if (!("scale" in changes || "show" in changes)) continue;
    const map = mapOf(layer, head, state.show);
    button.title = `layer ${layer}, head ${head}: from 0 to ${written(map.top, 3)}`;
    const level = map.levels.find((each) => Math.max(each.rows, each.columns) <= 64) || map.levels.at(-1);
    const canvas = button.firstChild;
    canvas.width = level.columns;
    canvas.height = level.rows;
    canvas.getContext("2d").drawImage(imageOf(map, level, [0, level.rows], [0, level.columns]), 0, 0);
  }
}

// The map of the chosen head, within the overview alone: the page stays where it is.
function bringIntoSight(button) {
  const grid = byId("grid");
  const [own, whole] = [button.getBoundingClientRect(), grid.getBoundingClientRect()];
  if (own.top < whole.top || own.bottom > whole.bottom) grid.scrollTop += own.top - whole.top - (whole.height - own.height) / 2;
  if (own.left < whole.left || own.right > whole.right) grid.scrollLeft += own.left - whole.left - (whole.width - own.width) / 2;
}

function showControls() {
  for (const id of ["layer", "head", "show", "scale"]) byId(id).value = String(state[id]);
}

function showReadout() {
  const map = chosen();
  const block = map.levels[0].block;
  const parts = [`layer ${state.layer}, head ${state.head}`, `${nameOf(0, state.row)} → ${nameOf(1, state.column)}: ${showOf().name === "weights" ? "weight" : showOf().name} ${told(codeAt(map, state.row, state.column), showOf())}`];
  if (showOf().kind === "share" || showOf().kind === "class") parts.shift();
  if (!isExact()) parts.push(`${showOf().kind === "share" ? "in" : "largest of"} ${block[0]} × ${block[1]}`);
  const compared = showOf().kind === "difference" || showOf().kind === "class";
  if (!compared && isEmpty(map, state.row)) parts.push(isExact() ? "this row is fully masked" : "these rows are fully masked");
  if (showOf().kind === "difference") {
    const worst = worstOf(map);
    if (worst) parts.push(`largest ${told(worst.code, showOf())} at ${nameOf(0, worst.row)}, ${nameOf(1, worst.column)}`);
    else parts.push("no difference");
  }
  byId("readout").textContent = parts.join(" · ");
}

function worstOf(map) {
  if (map.worst !== undefined) return map.worst;
  const level = map.levels[0];
  let best = 0;
  for (let i = 1; i < level.codes.length; i++) if (level.codes[i] > level.codes[best]) best = i;
  const [row, column] = [Math.floor(best / level.columns), best % level.columns];
  map.worst = level.codes[best] ? { code: level.codes[best], row: row * level.block[0], column: column * level.block[1] } : null;
  return map.worst;
}

function showLegend() {
  const show = showOf();
  if (show.kind === "class") return byId("legend").replaceChildren(...CLASSES.map((text, i) => box(CLASS_COLOURS[i], text)));
  if (show.kind === "share") {
    const items = [box(null, "masked"), box(ALLOWED, "may attend")];
    if (!isExact()) items.push(box(d3.interpolateViridis(0.7), "in part"));
    if (data.blocks) items.push("blocks: × skipped, thick lines need no mask");
    return byId("legend").replaceChildren(...items);
  }
  byId("legend").replaceChildren(...scaleOf(show, chosen().top));
}

// The scale of a picture of a map: its colours, the numbers at its ends, 0, which is a hatch without a colour, and NaN.
function scaleOf(show, top, seen = (colour) => colour, zero = null) {
  const bar = document.createElement("span");
  bar.className = "bar";
  bar.style.background = `linear-gradient(to right, ${d3.range(0, 1.01, 0.1).map((at) => seen(interpolated(show.kind)(at))).join(",")})`;
  const low = state.scale === "log" ? `logarithmic, 1e-${show.decades}` : "0";
  return [low, bar, written(top, 3), box(zero && seen(zero), show.kind === "difference" ? "equal" : "0: masked"), box(seen(NAN), "NaN")];
}

function box(colour, text) {
  const item = document.createElement("span");
  const mark = document.createElement("span");
  mark.className = colour ? "box" : "box hatch";
  if (colour) mark.style.background = colour;
  item.append(mark, text);
  return item;
}
