// What the plots of one run share: the axis, and the part of it that is looked at.

class View {
  constructor(ranges) {
    this.ranges = ranges;
    this.axis = ranges.step ? 'step' : 'time';
    this.zoom = null;
    this.plots = [];
    this.names = []; // labels of the lanes, [long, short], which all plots leave room for
  }

  get domain() {
    const [low, high] = this.zoom || this.ranges[this.axis] || [0, 1];
    return high > low ? [low, high] : [low - 0.5, high + 0.5];
  }

  // Room for the labels at the left of all plots, so that the same step is below itself.
  leftFor(labels) {
    const lanes = this.names.map(([long, short]) => (isNarrow() ? short : long));
    return (
      Math.ceil(Math.max(0, ...[...labels, ...lanes].map((words) => words.length)) * TEXT_WIDTH) +
      10
    );
  }

  setAxis(axis) {
    if (axis === this.axis || !this.ranges[axis]) return;
    this.axis = axis;
    this.setZoom(null);
  }

  setZoom(zoom) {
    this.zoom = zoom;
    this.draw();
    if (this.changed) this.changed();
  }

  draw() {
    for (const plot of this.plots) plot();
  }
}

// Dragging with a mouse looks closer at what was dragged over; a double click shows all again.
function allowZoom(root, view, place, left, right, top, bottom) {
  let from = null,
    band = null;
  root.addEventListener('pointerdown', (event) => {
    if (event.pointerType !== 'mouse' || event.button !== 0) return;
    from = clamp(pointOf(root, event).x, left, right);
  });
  root.addEventListener('pointermove', (event) => {
    if (from === null) return;
    const to = clamp(pointOf(root, event).x, left, right);
    if (!band && Math.abs(to - from) < 5) return;
    if (!band) {
      band = svg('rect', { class: 'band', y: top, height: bottom - top });
      root.append(band);
      root.setPointerCapture(event.pointerId);
    }
    band.setAttribute('x', Math.min(from, to));
    band.setAttribute('width', Math.abs(to - from));
  });
  root.addEventListener('pointerup', (event) => {
    const to = clamp(pointOf(root, event).x, left, right),
      begin = from,
      dragged = band;
    from = band = null;
    if (!dragged) return;
    dragged.remove();
    const ends = [place(Math.min(begin, to)), place(Math.max(begin, to))];
    if (ends[1] > ends[0]) view.setZoom(ends);
  });
  root.addEventListener('dblclick', () => view.setZoom(null));
}

function pointOf(root, event) {
  const box = root.getBoundingClientRect();
  const scale = root.viewBox.baseVal.width / box.width;
  return { x: (event.clientX - box.left) * scale, y: (event.clientY - box.top) * scale };
}

// Index of the item of a sorted list that is nearest to a value.
function nearest(sorted, value) {
  let low = 0,
    high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - sorted[low - 1] < sorted[low] - value ? low - 1 : low;
}

function canvas(figure, height, label) {
  const holder = figure.querySelector('.canvas');
  const width = printing ? PRINT_WIDTH : Math.max(240, Math.floor(holder.clientWidth));
  clear(holder);
  const root = svg('svg', {
    viewBox: `0 0 ${width} ${height}`,
    width: '100%',
    role: 'img',
    'aria-label': label,
  });
  holder.append(root);
  return { root, width };
}

// Paper is narrower than most windows, and a plot drawn for a wide one would be shrunk.
const PRINT_WIDTH = 720;
let printing = false;

function isNarrow() {
  return !printing && document.documentElement.clientWidth < 600;
}

function legend(figure, items) {
  const holder = figure.querySelector('.legend');
  clear(holder);
  for (const [className, words] of items) {
    const item = html('span', 'item');
    item.append(html('span', 'swatch ' + className), words);
    holder.append(item);
  }
}

function note(figure, words) {
  const holder = figure.querySelector('.plot-note');
  holder.textContent = words;
  holder.hidden = !words;
}
