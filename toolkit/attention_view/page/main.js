// Everything together, and the keys.
function next(values, value, step) {
  return values[(values.indexOf(value) + step + values.length) % values.length];
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(SELECT|INPUT)$/.test(event.target.tagName)) return;
  const { block } = chosen().levels[0];
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (event.key in moves && event.target === byId("map")) {
    event.preventDefault();
    const [down, across] = moves[event.key];
    change({ row: state.row + down * block[0], column: state.column + across * block[1] });
    return follow();
  }
  const actions = {
    "[": () => change({ head: next(data.heads, state.head, -1) }),
    "]": () => change({ head: next(data.heads, state.head, 1) }),
    "{": () => change({ layer: next(data.layers, state.layer, -1) }),
    "}": () => change({ layer: next(data.layers, state.layer, 1) }),
    s: () => change({ show: (state.show + 1) % data.shows.length }),
    "+": () => zoomBy(1.6),
    "-": () => zoomBy(1 / 1.6),
    0: resetZoom,
  };
  if (event.key in actions) actions[event.key]();
}

async function main() {
  await load();
  state.show = data.shows.length - 1;
  makeOverview();
  makeTokens();
  await makePicture();
  makeMatrix();
  document.addEventListener("keydown", press);
  change({ scale: state.scale, show: state.show, part: true });
  document.body.dataset.ready = "true";
}

main().catch((error) => {
  byId("readout").textContent = `This page cannot be shown: ${error.message}`;
  throw error;
});
