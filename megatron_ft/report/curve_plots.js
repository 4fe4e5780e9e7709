// The plots of curves: that of a run, with a choice of what it shows, and those that compare runs.

// The plot of a run, with buttons for what it shows.
function runCurves(figure, run, view, onIncident) {
  const controls = figure.querySelector('.curve-controls');
  let metric = run.curves.lm_loss ? 'lm_loss' : Object.keys(run.curves)[0],
    log = false;
  const title = figure.querySelector('h3');
  const draw = () => {
    const curve = run.curves[metric];
    if (!curve) {
      note(figure, 'No step is committed yet.');
      return;
    }
    const isLoss = metric === 'lm_loss';
    title.textContent =
      curve.label[0].toUpperCase() +
      curve.label.slice(1) +
      (view.axis === 'time' ? ' over time' : ' over steps');
    drawCurves(figure, view, [{ ...curve, name: curve.label, className: 'series-0' }], {
      log,
      label: title.textContent,
      onIncident,
      points: isLoss ? run.evals : [],
      incidents: run.incidents,
      starts: run.starts.slice(1),
      checkpoints: run.checkpoints,
    });
    const items = [['series-0 line', curve.label]];
    if (isLoss)
      for (const split of new Set(run.evals.map((one) => one.split)))
        items.push(['point ' + split, split + ' loss']);
    for (const type of ['died', 'unrepaired', 'other']) {
      if (run.incidents.some((one) => one.type === type))
        items.push(['incident ' + type, INCIDENT_WORDS[type]]);
    }
    if (run.checkpoints.length) items.push(['checkpoint', 'checkpoint']);
    if (run.starts.length > 1) items.push(['restart', 'the job was started again']);
    legend(figure, items);
    const words = [];
    const drawn = groups(curve.y.length);
    if (curve.y.length + curve.numNotFinite < curve.total) {
      words.push(`Thinned to ${drawn} of ${groups(curve.total)} steps; peaks and dips are kept.`);
    }
    if (curve.numNotFinite) {
      const named =
        curve.notFinite.slice(0, 8).join(', ') + (curve.numNotFinite > 8 ? ', ...' : '');
      words.push(`Not a finite number at ${curve.numNotFinite} steps: ${named}.`);
    }
    note(figure, words.join(' '));
  };
  if (Object.keys(run.curves).length) {
    const choice = html('select');
    choice.setAttribute('aria-label', 'curve');
    for (const name of Object.keys(run.curves)) {
      const option = html('option', '', run.curves[name].label);
      option.value = name;
      choice.append(option);
    }
    choice.value = metric;
    choice.addEventListener('change', () => {
      metric = choice.value;
      draw();
    });
    const label = html('label', '', ' log scale'),
      box = html('input');
    box.type = 'checkbox';
    box.addEventListener('change', () => {
      log = box.checked;
      draw();
    });
    label.prepend(box);
    controls.append(choice, label);
  }
  view.plots.push(draw);
}

function comparedCurves(section, comparison, view, common) {
  const losses = section.querySelector('[data-plot=losses]');
  const deltas = section.querySelector('[data-plot=differences]');
  const named = (list, from) =>
    list.map((one, k) => ({ ...one, className: 'series-' + ((k + from) % 8) }));
  const all = named(comparison.losses, 0),
    less = named(comparison.differences, 1);
  const items = (list) => list.map((one) => [one.className + ' line', one.name]);
  view.plots.push(() => {
    drawCurves(losses, view, all, { label: 'losses of all runs' });
    legend(losses, items(all));
  });
  common.plots.push(() => {
    drawCurves(deltas, common, less, { label: 'differences of losses', zero: true });
    legend(deltas, items(less));
  });
}
