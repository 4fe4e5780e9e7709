// SVG elements, axes, numbers as words, and the tip that follows the pointer.

const SVG = 'http://www.w3.org/2000/svg';
const TEXT_WIDTH = 6.4; // of a character of the plots' 11.5 px text, at the most

function svg(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const name in attributes) element.setAttribute(name, attributes[name]);
  if (text !== undefined) element.textContent = text;
  return element;
}

function html(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function clear(element) {
  while (element.firstChild) element.removeChild(element.firstChild);
}

const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

// --- numbers ---

function groups(integer) {
  return String(integer).replace(/\B(?=(\d{3})+(?!\d))/g, ',');
}

function numberText(value, precision) {
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4)
    return value
      .toExponential(2)
      .replace(/\.?0+e/, 'e')
      .replace('e+', 'e');
  if (size >= 1000) return groups(Math.round(value));
  return String(+value.toPrecision(precision || 4));
}

function secondsText(value) {
  if (value < 60) return numberText(value, 3) + ' s';
  const whole = Math.round(value),
    two = (n) => String(n).padStart(2, '0');
  if (whole < 3600)
    return Math.floor(whole / 60) + ' min' + (whole % 60 ? ' ' + two(whole % 60) + ' s' : '');
  if (whole < 86400) {
    const minutes = Math.floor((whole % 3600) / 60);
    return Math.floor(whole / 3600) + ' h' + (minutes ? ' ' + two(minutes) + ' min' : '');
  }
  const hours = Math.floor((whole % 86400) / 3600);
  return Math.floor(whole / 86400) + ' d' + (hours ? ' ' + hours + ' h' : '');
}

// --- scales ---

function linear(low, high, from, to) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

function logarithmic(low, high, from, to) {
  const scale = linear(Math.log(low), Math.log(high), from, to);
  return (value) => scale(Math.log(value));
}

// Round numbers between low and high, about `count` of them.
function ticks(low, high, count, least) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0)) return [low];
  const power = Math.pow(10, Math.max(least ? 0 : -Infinity, Math.floor(Math.log10(raw))));
  const step = Math.max(
    least || 0,
    power *
      [1, 2, 2.5, 5, 10].find(
        (unit) => unit * power >= raw * 0.999 && (!least || Number.isInteger(unit * power)),
      ),
  );
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++)
    found.push(+(n * step).toPrecision(12));
  return found;
}

const TIME_STEPS = [
  0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600,
  43200, 86400, 172800, 432000, 864000,
];

function timeTicks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const step = TIME_STEPS.find((unit) => unit >= raw);
  if (step === undefined || raw < TIME_STEPS[0]) return ticks(low, high, count);
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high; n++)
    found.push(+(n * step).toPrecision(12));
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const unit of [1, 2, 5]) {
      const value = +(unit * Math.pow(10, power)).toPrecision(3);
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  // Less than a decade may hold one of these or none.
  return found.length >= 3 ? found : ticks(low, high, 4);
}

// The horizontal axis below a plot, with its title at the right end.
function drawAxis(root, scale, domain, axis, left, right, bottom) {
  const room = Math.max(2, Math.floor((right - left) / 75));
  const places =
    axis === 'time' ? timeTicks(domain[0], domain[1], room) : ticks(domain[0], domain[1], room, 1);
  root.append(svg('line', { class: 'axis', x1: left, x2: right, y1: bottom, y2: bottom }));
  const titleAt = right - (axis === 'time' ? 0 : 4 * TEXT_WIDTH + 8);
  for (const place of places) {
    const x = scale(place);
    const words = axis === 'time' ? secondsText(place) : groups(place);
    const half = (words.length * TEXT_WIDTH) / 2;
    root.append(svg('line', { class: 'axis', x1: x, x2: x, y1: bottom, y2: bottom + 4 }));
    if (axis === 'time' || x + half < titleAt) {
      root.append(
        svg(
          'text',
          { x: clamp(x, half, right - half), y: bottom + 17, 'text-anchor': 'middle' },
          words,
        ),
      );
    }
  }
  if (axis !== 'time')
    root.append(
      svg('text', { x: right, y: bottom + 17, 'text-anchor': 'end', class: 'quiet' }, 'step'),
    );
}

// --- the tip ---

const tip = html('div', 'tip');
tip.hidden = true;
document.body.append(tip);

function showTip(event, lines) {
  clear(tip);
  lines.forEach((line, index) => tip.append(html('div', index ? '' : 'tip-head', line)));
  tip.hidden = false;
  const gap = 14,
    width = tip.offsetWidth,
    height = tip.offsetHeight;
  let left = event.clientX + gap,
    top = event.clientY + gap;
  if (left + width > document.documentElement.clientWidth - 4) left = event.clientX - width - gap;
  if (top + height > window.innerHeight - 4) top = event.clientY - height - gap;
  tip.style.left = Math.max(4, left) + 'px';
  tip.style.top = Math.max(4, top) + 'px';
}

function hideTip() {
  tip.hidden = true;
}
