// Puts the plots and tables of the page together.

const data = JSON.parse(document.getElementById('data').textContent);
const views = [];

function setUpRun(section, run, index) {
  const view = new View(run.range);
  views.push(view);
  const show = incidentTable(section.querySelector('.incidents'));
  const onIncident =
    show && ((number) => show(document.getElementById(`incident-${index}-${number}`)));
  const plot = (kind) => section.querySelector(`[data-plot=${kind}]`);
  runCurves(plot('curves'), run, view, onIncident);
  runWorld(plot('world'), run, view, `hatch-world-${index}`);
  runShares(plot('shares'), run, view, `hatch-shares-${index}`);
  const reset = section.querySelector('[data-reset]'),
    buttons = [...section.querySelectorAll('[data-axis]')];
  view.changed = () => {
    reset.hidden = !view.zoom;
    for (const button of buttons)
      button.setAttribute('aria-pressed', String(button.dataset.axis === view.axis));
  };
  for (const button of buttons) {
    button.disabled = !run.range[button.dataset.axis];
    button.addEventListener('click', () => view.setAxis(button.dataset.axis));
  }
  reset.addEventListener('click', () => view.setZoom(null));
  view.changed();
}

if (data.comparison) {
  const ends = (list) =>
    list.flatMap((one) => (one.step.length ? [one.step[0], one.step[one.step.length - 1]] : []));
  const over = (steps) =>
    new View({
      step: steps.length ? [Math.min(...steps) - 0.5, Math.max(...steps) + 0.5] : [0, 1],
    });
  // The runs may have only a few steps in common.
  const { losses, differences } = data.comparison,
    both = [over(ends(losses)), over(ends(differences))];
  views.push(...both);
  comparedCurves(document.querySelector('.comparison'), data.comparison, ...both);
}
data.runs.forEach((run, index) => setUpRun(document.getElementById('run-' + index), run, index));

function drawAll() {
  hideTip();
  for (const view of views) view.draw();
}
drawAll();

let width = document.documentElement.clientWidth,
  waiting = 0;
window.addEventListener('resize', () => {
  if (printing || document.documentElement.clientWidth === width) return;
  width = document.documentElement.clientWidth;
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(drawAll);
});
window.addEventListener('beforeprint', () => {
  printing = true;
  drawAll();
});
window.addEventListener('afterprint', () => {
  printing = false;
  drawAll();
});
window.addEventListener('scroll', hideTip, { passive: true });
document.documentElement.dataset.drawn = 'yes';
