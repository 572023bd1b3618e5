// A picture: a query is chosen on it, and the keys that it looks at are blocks over it, one map for each head.
const picture = { image: null };

async function makePicture() {
  if (!data.picture) return;
  byId("picture").hidden = byId("smooth-label").hidden = false;
  byId("smooth").addEventListener("change", () => change({}));
  picture.image = new Image();
  picture.image.src = data.picture.source;
  await picture.image.decode();
  state.row = data.picture.prefix + Math.floor((data.picture.grid[0] * data.picture.grid[1]) / 2 + data.picture.grid[1] / 2);
  const add = (name, caption, head) => {
    const figure = document.createElement("figure");
    figure.className = name;
    if (head !== undefined) figure.dataset.head = head;
    const canvas = document.createElement("canvas");
    const most = 512 / Math.max(...data.picture.size);
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
  const query = add("first", "The query: click a point, or move it by the arrow keys");
  query.tabIndex = 0;
  query.id = "query";
  query.setAttribute("role", "application");
  query.addEventListener("keydown", moveQuery);
  for (const head of data.heads) add("head", `head ${head}`, head).setAttribute("role", "img");
  listeners.push(drawPictures);
}

function patchAt(event) {
  const bounds = event.currentTarget.getBoundingClientRect();
  const [rows, columns] = data.picture.grid;
  const row = Math.min(rows - 1, Math.floor(((event.clientY - bounds.top) / bounds.height) * rows));
  const column = Math.min(columns - 1, Math.floor(((event.clientX - bounds.left) / bounds.width) * columns));
  return data.picture.prefix + row * columns + column;
}

function moveQuery(event) {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!step) return;
  event.preventDefault();
  event.stopPropagation();
  const { grid: [rows, columns], prefix } = data.picture;
  const at = Math.max(0, state.row - prefix);
  const row = Math.max(0, Math.min(rows - 1, Math.floor(at / columns) + step[0]));
  const column = Math.max(0, Math.min(columns - 1, (at % columns) + step[1]));
  change({ row: prefix + row * columns + column });
}

function drawPictures() {
  const { grid, key_grid: keys, prefix } = data.picture;
  const at = state.row - prefix;
  const place = at < 0 ? "before the patches" : `row ${Math.floor(at / grid[1])}, column ${at % grid[1]}`;
  for (const figure of byId("pictures").children) {
    const canvas = figure.firstChild;
    const context = canvas.getContext("2d");
    const head = figure.dataset.head;
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.imageSmoothingEnabled = false;
    context.drawImage(picture.image, 0, 0, canvas.width, canvas.height);
    if (head === undefined) canvas.setAttribute("aria-label", `picture, query at ${place}; arrow keys move it`);
    else drawKeys(figure, canvas, context, mapOf(state.layer, Number(head), state.show), place, keys, prefix);
    if (at >= 0) {
      const [height, width] = [canvas.height / grid[0], canvas.width / grid[1]];
      const [x, y] = [(at % grid[1]) * width, Math.floor(at / grid[1]) * height];
      for (const [wide, colour] of [[6, "#000"], [3, "#fff"]]) {
        context.lineWidth = wide;
        context.strokeStyle = colour;
        context.strokeRect(x, y, Math.max(width, 6), Math.max(height, 6));
      }
    }
  }
}

// The weights of the query as blocks, unless smooth ones are asked for: a key is as large as what it was pooled from.
// The brightest is the largest.
const keyImage = document.createElement("canvas");
function drawKeys(figure, canvas, context, map, place, keys, prefix) {
  figure.toggleAttribute("data-chosen", map.head === state.head);
  const show = data.shows[map.show];
  const weights = weightsOf(map, 0, state.row).slice(prefix);
  const top = d3.max(weights) || 1;
  const colour = show.kind === "difference" ? d3.interpolateInferno : d3.interpolateViridis;
  [keyImage.height, keyImage.width] = keys;
  const small = keyImage.getContext("2d");
  weights.forEach((weight, j) => {
    small.fillStyle = Number.isNaN(weight) ? "#ff00ff" : weight > 0 ? colour(weight / top) : "#202020";
    small.fillRect(j % keys[1], Math.floor(j / keys[1]), 1, 1);
  });
  context.imageSmoothingEnabled = byId("smooth").checked;
  context.globalAlpha = 0.68;
  context.drawImage(keyImage, 0, 0, canvas.width, canvas.height);
  context.globalAlpha = 1;
  const best = d3.maxIndex(weights);
  const empty = isEmpty(map, state.row) && show.kind !== "difference";
  const found = empty ? "fully masked" : `largest ${told(codeAt(map, state.row, prefix + best).code, show)} at row ${Math.floor(best / keys[1])}, column ${best % keys[1]} of ${keys[0]} × ${keys[1]} keys`;
  canvas.setAttribute("aria-label", `layer ${map.layer}, head ${map.head}, query at ${place}: ${found}`);
  figure.lastChild.textContent = `head ${map.head}: ${found}`;
}
