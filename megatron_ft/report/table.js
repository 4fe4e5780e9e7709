// Finding, filtering and sorting incidents.

function incidentTable(section) {
  const body = section.querySelector('tbody');
  if (!body) return null;
  const rows = [...body.rows],
    heads = [...section.querySelectorAll('thead th')];
  const find = section.querySelector('[data-find]'),
    kind = section.querySelector('[data-kind]');
  const choice = section.querySelector('[data-sort]'),
    count = section.querySelector('[data-count]');
  const texts = rows.map((row) => row.textContent.toLowerCase());
  let column = 0,
    down = false;

  const filter = () => {
    const wanted = find.value.trim().toLowerCase();
    let shown = 0;
    rows.forEach((row, k) => {
      const fits =
        texts[k].includes(wanted) &&
        (!kind.value || row.dataset.tags.split(' ').includes(kind.value));
      row.hidden = !fits;
      if (fits) shown++;
    });
    count.textContent = shown === rows.length ? '' : `${shown} of ${rows.length} shown`;
  };

  const keyOf = (row) => {
    const cell = row.cells[column],
      value = cell.dataset.v;
    if (value === undefined) return cell.textContent;
    return value === '' ? null : Number(value);
  };
  const sort = (next, turned) => {
    column = next;
    down = turned;
    const keyed = rows.map((row, k) => [keyOf(row), k, row]);
    keyed.sort(([a, i], [b, j]) => {
      // What was not measured comes last, whichever way.
      if (a === null || b === null) return (a === null) - (b === null) || i - j;
      const order = typeof a === 'number' ? a - b : a.localeCompare(b, 'en', { numeric: true });
      return (down ? -order : order) || i - j;
    });
    body.append(...keyed.map(([, , row]) => row));
    heads.forEach((head, k) =>
      head.setAttribute('aria-sort', k !== column ? 'none' : down ? 'descending' : 'ascending'),
    );
    choice.value = String(column);
  };
  heads.forEach((head, k) => {
    // Costs are looked at from the largest down.
    head
      .querySelector('button')
      .addEventListener('click', () => sort(k, k === column ? !down : k > 4));
  });
  choice.addEventListener('change', () => sort(Number(choice.value), Number(choice.value) > 4));
  find.addEventListener('input', filter);
  kind.addEventListener('change', filter);
  heads[0].setAttribute('aria-sort', 'ascending');

  return (row) => {
    if (row.hidden) {
      find.value = kind.value = '';
      filter();
    }
    for (const other of rows) other.classList.toggle('chosen', other === row);
    row.scrollIntoView({ block: 'center', behavior: 'smooth' });
  };
}
