// Lanes over steps or time: which process served a slot, and how much each replica computed.

const STATE_CLASSES = ['first', 'other', 'adopted', 'dark', 'vacant'];
const STATE_WORDS = [
  'its first process',
  'another process',
  'adopted by another slot',
  'dark: its replica is not used',
  'vacant: its process died',
];
const MARK_WORDS = {
  died: 'died',
  filled: 'filled',
  adopted: 'adopted',
  rebuilt: 'stage rebuilt',
  role: 'role changed',
  barred: 'not filled any more',
};
const NUM_SHADES = 5;

// Draws lanes of {label, short, spans: [begin, end, className, text, tip], marks, under}.
function drawLanes(figure, view, instants, lanes, options) {
  const axis = view.axis,
    domain = view.domain,
    at = instants[axis];
  const pitch = lanes.length > 48 ? 13 : lanes.length > 20 ? 16 : 21;
  const head = options.epochs ? 20 : 2;
  const height = head + lanes.length * pitch + 28;
  const { root, width } = canvas(figure, height, options.label);
  const names = lanes.map((lane) => (isNarrow() ? lane.short : lane.label));
  const left = view.leftFor(names);
  const right = width - 8,
    bottom = head + lanes.length * pitch + 2;
  const xOf = linear(domain[0], domain[1], left, right);
  const xAt = (instant) => clamp(xOf(at[instant]), left, right);

  const hatch = svg('pattern', {
    id: options.id,
    width: 6,
    height: 6,
    patternUnits: 'userSpaceOnUse',
    patternTransform: 'rotate(45)',
  });
  hatch.append(
    svg('rect', { class: 'hatch-ground', width: 6, height: 6 }),
    svg('line', { class: 'hatch', x1: 0, x2: 0, y1: 0, y2: 6 }),
  );
  const definitions = svg('defs', {});
  definitions.append(hatch);
  root.append(definitions);

  if (options.epochs) drawEpochs(root, options.epochs, xAt, left);
  const paths = {},
    words = [],
    over = [];
  const add = (className, x, y, w, h) => {
    paths[className] =
      (paths[className] || '') + `M${x.toFixed(1)} ${y}h${w.toFixed(1)}v${h}h-${w.toFixed(1)}z`;
  };
  lanes.forEach((lane, k) => {
    const top = head + k * pitch,
      tall = pitch - 3;
    root.append(
      svg('text', { x: left - 6, y: top + tall / 2 + 4, 'text-anchor': 'end' }, names[k]),
    );
    for (const [begin, end, className, text] of lane.spans) {
      const from = xAt(begin),
        to = xAt(end);
      // What lasted less than a pixel is seen all the same, unless it is off the plot.
      if (at[end] < domain[0] || at[begin] > domain[1] || (to <= from && at[end] <= at[begin]))
        continue;
      add(className, from, top, Math.max(0.8, to - from), tall);
      if (text && to - from > text.length * TEXT_WIDTH + 8 && tall > 11) {
        words.push(
          svg(
            'text',
            {
              class: 'in-' + className,
              x: (from + to) / 2,
              y: top + tall / 2 + 4,
              'text-anchor': 'middle',
            },
            text,
          ),
        );
      }
    }
    for (const [begin, end, className] of lane.under || []) {
      const from = xAt(begin),
        to = xAt(end);
      if (to > from) add(className, from, top + tall - 3, to - from, 3);
    }
    let before = -Infinity;
    for (const [instant, mark] of lane.marks || []) {
      if (!inDomain(at[instant], domain)) continue;
      // What happened at once stands side by side.
      const exact = xOf(at[instant]),
        x = exact - before < 10 && exact <= before ? before + 10 : exact;
      before = x;
      over.push(drawMark(mark, x, top + tall / 2));
    }
  });
  for (const className of Object.keys(paths).sort(
    (a, b) => (a.startsWith('role') ? 1 : 0) - (b.startsWith('role') ? 1 : 0),
  )) {
    const path = svg('path', { class: 'span ' + className, d: paths[className] });
    if (className === 'dark') path.style.fill = `url(#${options.id})`;
    root.append(path);
  }
  root.append(...words);
  // Marks of hundreds of incidents would hide the lanes; the tips name them.
  if (over.length <= (right - left) / 3) root.append(...over);
  drawAxis(root, xOf, domain, axis, left, right, bottom);

  const place = linear(left, right, domain[0], domain[1]);
  const cursor = vertical('cross-line', 0, head, bottom);
  cursor.setAttribute('visibility', 'hidden');
  root.append(cursor);
  const point = (event) => {
    const where = pointOf(root, event),
      lane = lanes[Math.floor((where.y - head) / pitch)];
    if (where.x < left || where.x > right || !lane) {
      cursor.setAttribute('visibility', 'hidden');
      hideTip();
      return;
    }
    cursor.setAttribute('x1', where.x);
    cursor.setAttribute('x2', where.x);
    cursor.setAttribute('visibility', 'visible');
    const value = place(where.x),
      lines = [lane.label + (lane.place ? ` (${lane.place})` : '')];
    lines.push(axis === 'time' ? 'at ' + secondsText(value) : `step ${groups(Math.round(value))}`);
    for (const list of [lane.spans, lane.under || []]) {
      const found = list.find(([begin, end]) => at[begin] <= value && value < at[end]);
      if (found) lines.push(found[4] || found[3]);
    }
    const reach = Math.abs(place(where.x + 5) - value);
    const near = (lane.marks || []).filter(([instant]) => Math.abs(at[instant] - value) <= reach);
    near.slice(0, 4).forEach(([, , text]) => lines.push(text));
    if (near.length > 4) lines.push(`and ${near.length - 4} more`);
    showTip(event, lines);
  };
  root.addEventListener('pointermove', point);
  root.addEventListener('pointerdown', point);
  root.addEventListener('pointerleave', () => {
    cursor.setAttribute('visibility', 'hidden');
    hideTip();
  });
  allowZoom(root, view, place, left, right, head, bottom);
}

function drawEpochs(root, epochs, xAt, left) {
  root.append(svg('text', { x: left - 6, y: 13, 'text-anchor': 'end', class: 'quiet' }, 'epoch'));
  for (const [begin, end, epoch] of epochs) {
    const from = xAt(begin),
      to = xAt(end),
      text = String(epoch);
    if (to <= from) continue;
    root.append(
      svg('rect', {
        class: epoch % 2 ? 'epoch odd' : 'epoch',
        x: from,
        y: 2,
        width: to - from,
        height: 15,
      }),
    );
    if (to - from > text.length * TEXT_WIDTH + 4) {
      root.append(
        svg('text', { x: (from + to) / 2, y: 13.5, 'text-anchor': 'middle', class: 'quiet' }, text),
      );
    }
  }
}

function drawMark(mark, x, y) {
  const shapes = {
    died: `M${x - 4} ${y - 4}l8 8m0 -8l-8 8`,
    filled: `M${x - 4} ${y}h8m-4 -4v8`,
    adopted: `M${x - 4} ${y + 4}l4 -8l4 8z`,
    rebuilt: `M${x} ${y - 5}l5 5l-5 5l-5 -5z`,
    barred: `M${x - 5} ${y - 2}h10v4h-10z`,
    role: `M${x - 3} ${y - 3}h6v6h-6z`,
  };
  return svg('path', { class: 'mark ' + mark, d: shapes[mark] });
}

function runWorld(figure, run, view, id) {
  if (!run.lanes.length) {
    figure.hidden = true;
    return;
  }
  const lanes = run.lanes.map((lane) => ({
    ...lane,
    spans: lane.spans.map(([begin, end, state, process]) => [
      begin,
      end,
      STATE_CLASSES[state],
      process === null ? '' : String(process),
      state >= 3
        ? STATE_WORDS[state]
        : `served by process ${process === null ? '?' : process}` +
          (state === 2 ? ', of another slot' : ''),
    ]),
  }));
  const marks = new Set(run.lanes.flatMap((lane) => lane.marks.map((mark) => mark[1])));
  view.names.push(['epoch', 'epoch'], ...lanes.map((lane) => [lane.label, lane.short]));
  view.plots.push(() => {
    drawLanes(figure, view, run.instants, lanes, {
      epochs: run.epochs,
      id,
      label: 'which process served each slot',
    });
    const at = run.instants[view.axis];
    const seen = run.lanes
      .flatMap((lane) => lane.spans)
      .filter(([begin, end]) => at[end] > at[begin]);
    const states = new Set(seen.map((span) => span[2]));
    legend(figure, [
      ...[...states].sort().map((state) => [STATE_CLASSES[state], STATE_WORDS[state]]),
      ...[...marks].map((mark) => ['glyph ' + mark, MARK_WORDS[mark]]),
    ]);
    note(figure, 'The number in a lane is the process. ' + run.worldNote);
  });
}

function runShares(figure, run, view, id) {
  if (!run.replicas.some((lane) => lane.quotas.length)) {
    figure.hidden = true;
    return;
  }
  const values = run.replicas
    .flatMap((lane) => lane.quotas.map((span) => span[2]))
    .filter((quota) => quota > 0);
  const low = Math.min(...values),
    high = Math.max(...values);
  const shade = (quota) =>
    high === low ? 2 : Math.round(((quota - low) / (high - low)) * (NUM_SHADES - 1));
  const roles = [
    ...new Set(run.replicas.flatMap((lane) => lane.roles.map((span) => span[2]))),
  ].sort();
  const lanes = run.replicas.map((lane) => ({
    ...lane,
    spans: lane.quotas.map(([begin, end, quota]) =>
      quota < 0
        ? [begin, end, 'dark', '', 'dark']
        : [
            begin,
            end,
            quota ? 'shade-' + shade(quota) : 'idle',
            String(quota),
            `${quota} of ${run.batch} microbatches a step`,
          ],
    ),
    under: lane.roles.map(([begin, end, role]) => [
      begin,
      end,
      'role-' + (roles.indexOf(role) % 4),
      '',
      'role: ' + role,
    ]),
  }));
  view.names.push(...lanes.map((lane) => [lane.label, lane.short]));
  view.plots.push(() => {
    drawLanes(figure, view, run.instants, lanes, { id, label: 'microbatches of each replica' });
    const items = [];
    const shown = new Set(lanes.flatMap((lane) => lane.spans.map((span) => span[2])));
    if (values.length) {
      items.push([
        'shade-' + shade(low),
        high === low ? `${low} microbatches` : `${low} (the fewest)`,
      ]);
      if (high > low) items.push(['shade-' + shade(high), `${high} (the most)`]);
    }
    if (shown.has('idle')) items.push(['idle', 'none: a spare']);
    if (shown.has('dark')) items.push(['dark', 'dark']);
    roles.forEach((role, k) => items.push(['role-' + (k % 4) + ' line', 'role: ' + role]));
    legend(figure, items);
    note(
      figure,
      'The number in a lane is how many microbatches of a step the replica computes. ' +
        run.sharesNote,
    );
  });
}
