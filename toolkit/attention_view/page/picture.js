// A picture: a query is chosen on it, and the keys that it looks at are blocks over it, one map for each head.
const picture = { image: null };
// How opaque weights are over it, and what share of its contrast it keeps there, next to white: what is seen is the weights.
const [COVER, CONTRAST] = [0.8, 0.2];
const seen = (colour) => d3.interpolateRgb(d3.gray(100 - 50 * CONTRAST), colour)(COVER);

async function makePicture() {
  if (!data.picture) return;
  byId("picture").hidden = byId("smooth-label").hidden = false;
  byId("smooth").addEventListener("change", () => change({}));
  picture.image = new Image();
  picture.image.src = data.picture.source;
  await picture.image.decode();
  const add = (name, caption, head, pixels = 512) => {
    const figure = document.createElement("figure");
    figure.className = name;
    if (head !== undefined) figure.dataset.head = head;
    const canvas = document.createElement("canvas");
    const most = pixels / Math.max(...data.picture.size);
    canvas.height = Math.max(1, Math.round(data.picture.size[0] * most));
    canvas.width = Math.max(1, Math.round(data.picture.size[1] * most));
    canvas.addEventListener("click", (event) => {
      if (head !== undefined) change({ head });
      change({ row: patchAt(event) });
    });
    figure.append(canvas, Object.assign(document.createElement("figcaption"), { textContent: caption }));
    byId("pictures").append(figure);
    return canvas;
  };
  // The chosen head, as large as there is room; then the picture alone, and each head.
  const query = add("first", "", undefined, 1024);
  query.tabIndex = 0;
  query.id = "query";
  query.setAttribute("role", "application");
  query.addEventListener("keydown", moveQuery);
  query.after(Object.assign(document.createElement("div"), { id: "picture-legend", className: "legend" }));
  add("plain", "the picture").setAttribute("role", "img");
  for (const head of data.heads) add("head", `head ${head}`, head).setAttribute("role", "img");
  listeners.push(drawPictures);
}

// The query that is kept nearest to a point.
function patchAt(event) {
  const bounds = event.currentTarget.getBoundingClientRect();
  const { grid: [rows, columns], places } = data.picture;
  const row = Math.min(rows - 1, Math.floor(((event.clientY - bounds.top) / bounds.height) * rows));
  const column = Math.min(columns - 1, Math.floor(((event.clientX - bounds.left) / bounds.width) * columns));
  return nearest(places, (place) => Math.hypot(Math.floor(place / columns) - row, (place % columns) - column));
}

// The row of the place with the least distance.
function nearest(places, distance) {
  return d3.minIndex(places, (place) => (place < 0 ? undefined : distance(place)));
}

function moveQuery(event) {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!step) return;
  event.preventDefault();
  event.stopPropagation();
  const { grid: [, columns], places } = data.picture;
  const at = Math.max(0, places[state.row]);
  // The next one in this direction, rather ahead than aside.
  const row = nearest(places, (place) => {
    const [down, across] = [Math.floor(place / columns) - Math.floor(at / columns), (place % columns) - (at % columns)];
    const ahead = down * step[0] + across * step[1];
    return ahead > 0 ? ahead + 2 * Math.abs(down * step[1] + across * step[0]) : undefined;
  });
  if (row >= 0) change({ row });
}

function drawPictures() {
  const { grid, places } = data.picture;
  const at = places[state.row];
  const place = placeOf(0, state.row);
  for (const figure of byId("pictures").children) {
    const [canvas, caption] = [figure.firstChild, figure.lastChild];
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = true;
    context.filter = figure.className === "plain" ? "none" : "grayscale(1)"; // colours are of weights alone
    context.drawImage(picture.image, 0, 0, canvas.width, canvas.height);
    context.filter = "none";
    if (figure.className !== "plain") {
      context.fillStyle = `rgb(255 255 255 / ${1 - CONTRAST})`;
      context.fillRect(0, 0, canvas.width, canvas.height);
    }
    const map = figure.className === "plain" ? null : mapOf(state.layer, Number(figure.dataset.head ?? state.head), state.show);
    figure.hidden = map === undefined; // layers may have other numbers of heads
    if (map === undefined) continue;
    let said = `picture, ${place}`;
    if (map) {
      const { top, found } = drawKeys(canvas, context, map);
      said = `layer ${map.layer}, head ${map.head}, ${place}: ${found}`;
      caption.textContent = `head ${map.head}: from 0 to ${written(top, 3)}; ${found}`;
      if (canvas.id) {
        caption.textContent = `${said}. Click a query, or move it by the arrow keys.`;
        byId("picture-legend").replaceChildren(...scaleOf(showOf(), top, seen, ZERO));
      } else figure.toggleAttribute("data-chosen", map.head === state.head);
    }
    canvas.setAttribute("aria-label", said);
    if (at < 0) continue;
    const [height, width] = [canvas.height / grid[0], canvas.width / grid[1]];
    const [x, y] = [(at % grid[1]) * width, Math.floor(at / grid[1]) * height];
    for (const [wide, colour] of [[6, "#000"], [3, "#fff"]]) {
      context.lineWidth = wide;
      context.strokeStyle = colour;
      context.strokeRect(x, y, Math.max(width, 6), Math.max(height, 6));
    }
  }
}

// The weights of the query as blocks, unless smooth ones are asked for: a key is as large as what it was pooled from.
// The brightest is the largest, unless that is little more than an even share.
const keyImage = document.createElement("canvas");
function drawKeys(canvas, context, map) {
  const { key_grid: keys, class_tokens } = data.picture;
  const show = data.shows[map.show];
  const weights = weightsOf(map, 0, state.row).slice(class_tokens);
  const best = d3.maxIndex(weights);
  const largest = weights[best] || 0; // all may be NaN
  const top = show.kind === "difference" ? largest || 1 : Math.max(largest, map.part.least);
  const { columns, codes } = map.levels[0];
  const colour = painter(map, top);
  [keyImage.height, keyImage.width] = keys;
  const small = keyImage.getContext("2d");
  const image = small.createImageData(keys[1], keys[0]);
  const pixels = new Uint32Array(image.data.buffer);
  const first = state.row * columns + class_tokens;
  for (let j = 0; j < pixels.length; j++) pixels[j] = colour(codes[first + j]) || ZERO_BYTES;
  small.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = byId("smooth").checked;
  context.globalAlpha = COVER;
  context.drawImage(keyImage, 0, 0, canvas.width, canvas.height);
  context.globalAlpha = 1;
  if (isEmpty(map, state.row) && show.kind !== "difference") return { top, found: "fully masked" };
  return { top, found: `largest ${told(codes[first + Math.max(0, best)], show)} at row ${Math.floor(best / keys[1])}, column ${best % keys[1]} of ${keys[0]} × ${keys[1]} keys` };
}
