// The map of one head: the level of detail that has about a pixel for each cell, under pan and zoom.
const matrix = { transform: null, zoom: null, frame: 0, drawn: 0, side: 0 };

function makeMatrix() {
  const canvas = byId("map");
  matrix.transform = d3.zoomIdentity;
  matrix.zoom = d3.zoom().on("zoom", (event) => {
    matrix.transform = event.transform;
    requestDraw();
  });
  const selection = d3.select(canvas).call(matrix.zoom).on("dblclick.zoom", null);
  canvas.addEventListener("pointermove", (event) => {
    if (event.buttons === 0 && event.pointerType !== "touch") pointAt(event);
  });
  canvas.addEventListener("click", pointAt);
  byId("reset").addEventListener("click", resetZoom);
  new ResizeObserver(resize).observe(byId("frame"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", requestDraw);
  listeners.push(({ part }) => (part ? (resize(), resetZoom()) : requestDraw()));
  resize();
  return selection;
}

function resize() {
  const canvas = byId("map");
  const [rows, columns] = partOf().lengths;
  const height = Math.max(160, Math.min(640, (byId("frame").clientWidth * rows) / columns));
  // Pairs are squares, unless one side is much longer than the other.
  const wide = columns * 4 < rows ? columns * 4 : columns;
  const width = Math.min(byId("frame").clientWidth, Math.max(160, (height * wide) / rows));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const dense = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * dense);
  canvas.height = Math.round(height * dense);
  const most = Math.max(8, rows / 4, columns / 4);
  matrix.zoom.scaleExtent([1, most]).extent([[0, 0], [width, height]]).translateExtent([[0, 0], [width, height]]);
  requestDraw();
}

const resetZoom = () => d3.select(byId("map")).call(matrix.zoom.transform, d3.zoomIdentity);

// Pixels of the canvas (in CSS) for each key and each query before the zoom.
function pitch() {
  const canvas = byId("map");
  return [canvas.clientWidth / partOf().lengths[1], canvas.clientHeight / partOf().lengths[0]];
}

function pointAt(event) {
  const bounds = byId("map").getBoundingClientRect();
  const [x, y] = matrix.transform.invert([event.clientX - bounds.left, event.clientY - bounds.top]);
  const [across, down] = pitch();
  const [row, column] = [Math.floor(y / down), Math.floor(x / across)];
  if (row !== state.row || column !== state.column) change({ row, column });
}

// Keep the cell in sight when it is moved by the keyboard.
function follow() {
  const [across, down] = pitch();
  const canvas = byId("map");
  const at = [(state.column + 0.5) * across, (state.row + 0.5) * down];
  const [x, y] = matrix.transform.apply(at);
  if (x >= 0 && y >= 0 && x <= canvas.clientWidth && y <= canvas.clientHeight) return;
  d3.select(canvas).call(matrix.zoom.translateTo, ...at);
}

function zoomBy(factor) {
  const [across, down] = pitch();
  const at = matrix.transform.apply([(state.column + 0.5) * across, (state.row + 0.5) * down]);
  d3.select(byId("map")).call(matrix.zoom.scaleBy, factor, at);
}

function requestDraw() {
  if (!matrix.frame) matrix.frame = requestAnimationFrame(drawMatrix);
}

// The finest level whose cells have a pixel or more each way: no cell is left out.
function levelFor(map, width, height) {
  const [across, down] = [width / partOf().lengths[1], height / partOf().lengths[0]];
  return map.levels.find(({ block }) => block[1] * across >= 1 && block[0] * down >= 1) || map.levels.at(-1);
}

// From which to which, of so many cells of that size, is in sight.
function inSight(shift, zoom, size, cell, count) {
  const at = (pixel) => (pixel - shift) / zoom / cell;
  return [Math.max(0, Math.floor(at(0))), Math.min(count, Math.ceil(at(size)))];
}

function drawMatrix() {
  matrix.frame = 0;
  const canvas = byId("map");
  if (!canvas.clientWidth) return;
  matrix.drawn += 1;
  const context = canvas.getContext("2d");
  const { k, x, y } = matrix.transform;
  const dense = canvas.width / canvas.clientWidth;
  const map = chosen();
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.setTransform(k * dense, 0, 0, k * dense, x * dense, y * dense);
  context.imageSmoothingEnabled = false;
  const level = levelFor(map, canvas.width * k, canvas.height * k);
  canvas.dataset.level = `${level.rows}x${level.columns}`;
  const [across, down] = pitch();
  const [height, width] = [level.block[0] * down, level.block[1] * across];
  const rows = inSight(y, k, canvas.clientHeight, height, level.rows);
  const columns = inSight(x, k, canvas.clientWidth, width, level.columns);
  // The last cells may stand for fewer queries or keys, and reach beyond the end.
  context.save();
  context.beginPath();
  context.rect(0, 0, canvas.clientWidth, canvas.clientHeight);
  context.clip();
  const image = imageOf(map, level, rows, columns);
  context.drawImage(image, columns[0] * width, rows[0] * height, image.width * width, image.height * height);
  context.restore();
  if (data.blocks && byId("blocks").checked) drawBlocks(context, k);
  drawEmpty(context, map, level, k);
  const style = getComputedStyle(document.documentElement);
  context.lineWidth = 2 / k;
  context.strokeStyle = style.getPropertyValue("--mark");
  const cell = map.levels[0].block;
  const [row, column] = [Math.floor(state.row / cell[0]) * cell[0], Math.floor(state.column / cell[1]) * cell[1]];
  const [w, h] = [Math.max(cell[1] * across, 5 / k), Math.max(cell[0] * down, 5 / k)];
  context.strokeRect(column * across, row * down, w, h);
  canvas.setAttribute("aria-label", `map of ${partOf().lengths[0]} queries × ${partOf().lengths[1]} keys, ${showOf().name}, layer ${state.layer}, head ${state.head}; ${byId("readout").textContent}`);
}

// A mark at the left of each fully masked row.
function drawEmpty(context, map, level, k) {
  if (showOf().kind === "difference" || showOf().kind === "class") return;
  const down = pitch()[1];
  const style = getComputedStyle(document.documentElement);
  context.fillStyle = style.getPropertyValue("--mark");
  if (!level.empty) {
    level.empty = [];
    for (let i = 0; i < level.rows; i++) {
      let some = 0;
      for (let j = 0; j < level.columns && !some; j++) some = level.codes[i * level.columns + j];
      if (!some) level.empty.push(i);
    }
  }
  for (const i of level.empty) context.fillRect(0, i * level.block[0] * down, 6 / k, Math.max(1 / k, level.block[0] * down));
}

function drawBlocks(context, k) {
  const { rows, columns, block, codes } = data.blocks;
  const [across, down] = pitch();
  const [width, height] = [block[1] * across, block[0] * down];
  if (Math.min(width, height) * k < 4) return;
  const style = getComputedStyle(document.documentElement);
  const seenRows = inSight(matrix.transform.y, k, byId("map").clientHeight, height, rows);
  const seenColumns = inSight(matrix.transform.x, k, byId("map").clientWidth, width, columns);
  for (let i = seenRows[0]; i < seenRows[1]; i++) {
    for (let j = seenColumns[0]; j < seenColumns[1]; j++) {
      const [x, y] = [j * width, i * height];
      const [right, bottom] = [Math.min(x + width, byId("map").clientWidth), Math.min(y + height, byId("map").clientHeight)];
      const code = codes[i * columns + j];
      context.strokeStyle = style.getPropertyValue(code === 0 ? "--soft" : "--ink");
      context.lineWidth = (code === 2 ? 2.5 : 1) / k;
      context.strokeRect(x + 1 / k, y + 1 / k, right - x - 2 / k, bottom - y - 2 / k);
      if (code !== 0) continue;
      context.beginPath();
      context.moveTo(x, y);
      context.lineTo(right, bottom);
      context.moveTo(right, y);
      context.lineTo(x, bottom);
      context.stroke();
    }
  }
}
