// Curves over steps or time, with incidents marked.

const MAX_LINES = 40; // more incidents than this are ticks below the curve only
const MARKS_HEIGHT = 14;
const INCIDENT_WORDS = {
  died: 'a process died',
  unrepaired: 'died, not repaired',
  other: 'joined or changed, nobody died',
};

// Draws series of {name, step, time, y, className}. Options: log, zero, points, incidents, starts,
// checkpoints, valueText, label.
function drawCurves(figure, view, series, options) {
  const height = 300,
    axis = view.axis,
    domain = view.domain;
  const { root, width } = canvas(figure, height, options.label);
  const marks = options.incidents && options.incidents.length ? MARKS_HEIGHT : 0;
  const top = 10,
    bottom = height - 26 - marks,
    right = width - 8;

  const inside = series.map((one) => within(one[axis], domain));
  let low = Infinity,
    high = -Infinity;
  const see = (value) => {
    if (options.log && value <= 0) return;
    low = Math.min(low, value);
    high = Math.max(high, value);
  };
  series.forEach((one, k) => {
    for (let i = inside[k][0]; i < inside[k][1]; i++) see(one.y[i]);
  });
  for (const point of options.points || []) if (inDomain(point[axis], domain)) see(point.y);
  if (options.zero) see(0);
  if (low === Infinity) {
    root.append(
      svg(
        'text',
        { x: width / 2, y: height / 2, 'text-anchor': 'middle', class: 'quiet' },
        'nothing to show',
      ),
    );
    return;
  }
  if (low === high) {
    const pad = Math.abs(low) * 0.1 || 1;
    low -= options.log ? low / 2 : pad;
    high += pad;
  } else if (!options.log) {
    const pad = (high - low) * 0.04;
    low -= pad;
    high += pad;
  }

  const places = options.log ? logTicks(low, high) : ticks(low, high, 5);
  const words = places.map((value) => numberText(value, 6));
  const left = view.leftFor(words);
  const xOf = linear(domain[0], domain[1], left, right);
  const yOf = (options.log ? logarithmic : linear)(low, high, bottom, top);

  places.forEach((value, k) => {
    const y = yOf(value);
    root.append(svg('line', { class: 'grid', x1: left, x2: right, y1: y, y2: y }));
    root.append(svg('text', { x: left - 6, y: y + 4, 'text-anchor': 'end' }, words[k]));
  });
  if (options.zero && low < 0 && high > 0) {
    root.append(svg('line', { class: 'axis', x1: left, x2: right, y1: yOf(0), y2: yOf(0) }));
  }
  drawAxis(root, xOf, domain, axis, left, right, bottom + marks);

  const incidents = (options.incidents || []).filter((one) => inDomain(one[axis], domain));
  if (marks) drawIncidents(root, incidents, xOf, axis, top, bottom, left, right);
  for (const one of options.starts || []) {
    if (inDomain(one[axis], domain)) root.append(vertical('restart', xOf(one[axis]), top, bottom));
  }
  for (const one of options.checkpoints || []) {
    if (inDomain(one[axis], domain))
      root.append(vertical('checkpoint', xOf(one[axis]), bottom - 7, bottom));
  }

  series.forEach((one, k) => {
    const line = polyline(
      one,
      axis,
      [Math.max(0, inside[k][0] - 1), Math.min(one.y.length, inside[k][1] + 1)],
      xOf,
      yOf,
      options.log,
      left,
      right,
    );
    root.append(
      svg('path', {
        class: `curve ${inside[k][1] - inside[k][0] < 150 ? 'sparse ' : ''}${one.className}`,
        d: line,
      }),
    );
    if (inside[k][1] - inside[k][0] <= 60 && series.length === 1) {
      for (let i = inside[k][0]; i < inside[k][1]; i++) {
        if (!options.log || one.y[i] > 0)
          root.append(
            svg('circle', {
              class: 'dot ' + one.className,
              cx: xOf(one[axis][i]),
              cy: yOf(one.y[i]),
              r: 2,
            }),
          );
      }
    }
  });
  for (const point of options.points || []) {
    if (inDomain(point[axis], domain) && (!options.log || point.y > 0)) {
      root.append(
        svg('circle', {
          class: 'point ' + point.split,
          cx: xOf(point[axis]),
          cy: yOf(point.y),
          r: 4,
        }),
      );
    }
  }

  const cross = svg('g', { class: 'cross', visibility: 'hidden' });
  const crossLine = vertical('', 0, top, bottom);
  cross.append(crossLine);
  const crossDots = series.map((one) => {
    const dot = svg('circle', { class: 'dot ' + one.className, r: 4 });
    cross.append(dot);
    return dot;
  });
  root.append(cross);
  const place = linear(left, right, domain[0], domain[1]);

  const point = (event) => {
    const at = pointOf(root, event);
    const near = closest(incidents, axis, place(at.x), Math.abs(place(at.x + 6) - place(at.x)));
    if (near.length && at.y > bottom) {
      cross.setAttribute('visibility', 'hidden');
      showTip(event, tipLines(near));
      return;
    }
    const lines = [];
    let where = null;
    series.forEach((one, k) => {
      crossDots[k].setAttribute('visibility', 'hidden');
      if (!one[axis].length) return;
      const i = nearest(one[axis], place(at.x));
      if (!inDomain(one[axis][i], domain) || (options.log && one.y[i] <= 0)) return;
      if (where === null) {
        where = xOf(one[axis][i]);
        lines.push(
          axis === 'time'
            ? `${secondsText(one.time[i])}, step ${groups(one.step[i])}`
            : `step ${groups(one.step[i])}`,
        );
      }
      lines.push(`${one.name} ${numberText(one.y[i], 7)}`);
      crossDots[k].setAttribute('cx', xOf(one[axis][i]));
      crossDots[k].setAttribute('cy', yOf(one.y[i]));
      crossDots[k].removeAttribute('visibility');
    });
    for (const one of options.points || []) {
      if (Math.abs(xOf(one[axis]) - at.x) < 6)
        lines.push(`${one.split} loss ${numberText(one.y, 7)}`);
    }
    for (const one of [...(options.checkpoints || []), ...(options.starts || [])]) {
      if (Math.abs(xOf(one[axis]) - at.x) < 4) lines.push(one.text);
    }
    if (near.length) lines.push('', ...tipLines(near));
    if (where === null) {
      cross.setAttribute('visibility', 'hidden');
      hideTip();
      return;
    }
    crossLine.setAttribute('x1', where);
    crossLine.setAttribute('x2', where);
    cross.setAttribute('visibility', 'visible');
    showTip(event, lines);
  };
  root.addEventListener('pointermove', point);
  root.addEventListener('pointerdown', point);
  root.addEventListener('pointerleave', () => {
    cross.setAttribute('visibility', 'hidden');
    hideTip();
  });
  root.addEventListener('click', (event) => {
    const at = pointOf(root, event);
    if (at.y < bottom || !options.onIncident) return;
    const near = closest(incidents, axis, place(at.x), Math.abs(place(at.x + 6) - place(at.x)));
    if (near.length) options.onIncident(near[0].row);
  });
  allowZoom(root, view, place, left, right, top, bottom);
}

const inDomain = (value, domain) => value >= domain[0] && value <= domain[1];

// First and one past the last index of a sorted list that lie in the domain.
function within(sorted, domain) {
  let begin = 0,
    end = sorted.length;
  while (begin < end && sorted[begin] < domain[0]) begin++;
  while (end > begin && sorted[end - 1] > domain[1]) end--;
  return [begin, end];
}

function vertical(className, x, top, bottom) {
  return svg('line', { class: className, x1: x, x2: x, y1: top, y2: bottom });
}

function polyline(one, axis, [begin, end], xOf, yOf, log, left, right) {
  let path = '',
    pen = 'M';
  for (let i = begin; i < end; i++) {
    if (log && one.y[i] <= 0) {
      pen = 'M';
      continue;
    }
    const x = clamp(xOf(one[axis][i]), left - 1, right + 1);
    path += `${pen}${x.toFixed(1)} ${yOf(one.y[i]).toFixed(1)}`;
    pen = 'L';
  }
  return path;
}

function drawIncidents(root, incidents, xOf, axis, top, bottom, left, right) {
  root.append(
    svg('rect', {
      class: 'strip',
      x: left,
      y: bottom + 1,
      width: right - left,
      height: MARKS_HEIGHT - 2,
    }),
  );
  const few = incidents.length <= MAX_LINES;
  for (const one of incidents) {
    const x = xOf(one[axis]);
    if (few) root.append(vertical('incident-line ' + one.type, x, top, bottom));
    root.append(vertical('incident ' + one.type, x, bottom + 1, bottom + MARKS_HEIGHT - 1));
  }
}

function closest(incidents, axis, place, reach) {
  return incidents
    .filter((one) => Math.abs(one[axis] - place) <= reach)
    .sort((a, b) => Math.abs(a[axis] - place) - Math.abs(b[axis] - place));
}

function tipLines(incidents) {
  const shown = incidents
    .slice(0, 2)
    .flatMap((one, k) => (k ? [''] : []).concat(one.text.split('\n')));
  if (incidents.length > 2) shown.push('', `and ${incidents.length - 2} more here: look closer`);
  return shown;
}
