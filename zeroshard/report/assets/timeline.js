// Memory over one step, from its events alone: totals, the peak, what is live, and points to draw. No drawing here.

export class Timeline {
  constructor(film, columns) {
    const { events, initial } = film;
    this.events = events;
    this.initial = initial ?? { nbytes: [], storage: [], column: [], module: [], tensor: [], operation: [] };
    this.columns = columns;
    const count = events.t_s.length;
    this.count = count;
    this.times = Float64Array.from(events.t_s);
    // Moment k is after k events, so there is one more than there are events.
    this.totals = new Float64Array(count + 1);
    this.byColumn = columns.map(() => new Float64Array(count + 1));
    this.initial.nbytes.forEach((nbytes, place) => {
      this.totals[0] += nbytes;
      this.byColumn[this.initial.column[place]][0] += nbytes;
    });
    const running = this.byColumn.map((values) => values[0]);
    let total = this.totals[0];
    this.peak = 0;
    for (let place = 0; place < count; place += 1) {
      running[events.column[place]] += events.nbytes[place];
      total += events.nbytes[place];
      this.totals[place + 1] = total;
      for (let column = 0; column < running.length; column += 1) this.byColumn[column][place + 1] = running[column];
      if (total > this.totals[this.peak]) this.peak = place + 1;
    }
    this.start = Math.min(0, count ? this.times[0] : 0);
    const ends = (film.phases ?? []).map((phase) => phase.stop_s);
    this.stop = Math.max(count ? this.times[count - 1] : 0, ...ends);
    if (!(this.stop > this.start)) this.stop = this.start + 1;
    this._pair();
  }

  get peakBytes() {
    return this.totals[this.peak];
  }

  /** Notes for each allocation the event that gives it back. */
  _pair() {
    const { nbytes, storage } = this.events;
    this.freed = new Int32Array(this.count).fill(this.count);
    this.freedInitial = new Int32Array(this.initial.nbytes.length).fill(this.count);
    const open = new Map(this.initial.storage.map((one, place) => [one, -1 - place]));
    for (let place = 0; place < this.count; place += 1) {
      if (nbytes[place] >= 0) {
        open.set(storage[place], place);
      } else {
        const taken = open.get(storage[place]);
        if (taken === undefined) continue;
        if (taken < 0) this.freedInitial[-1 - taken] = place;
        else this.freed[taken] = place;
        open.delete(storage[place]);
      }
    }
  }

  /** Returns the moment at a time: the number of events that have happened. */
  momentAt(seconds) {
    let low = 0;
    let high = this.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.times[middle] <= seconds) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  timeOf(moment) {
    return moment ? this.times[moment - 1] : this.start;
  }

  /** Lists what is live at a moment, largest first. */
  live(moment) {
    const found = [];
    const add = (source, place) =>
      source.nbytes[place] > 0 &&
      found.push({
        nbytes: source.nbytes[place],
        column: source.column[place],
        module: source.module[place],
        tensor: source.tensor[place],
        operation: source.operation[place],
      });
    this.initial.nbytes.forEach((_, place) => this.freedInitial[place] >= moment && add(this.initial, place));
    for (let place = 0; place < moment; place += 1)
      if (this.events.nbytes[place] > 0 && this.freed[place] >= moment) add(this.events, place);
    return found.sort((one, other) => other.nbytes - one.nbytes);
  }

  /**
   * Returns moments to draw between two times: of each of `bins` equal parts the first, the lowest, the highest and the
   * last, so that no peak is lost however many events a pixel has.
   */
  sample(start, stop, bins) {
    const first = Math.max(0, this.momentAt(start) - 1);
    const last = Math.min(this.count, this.momentAt(stop) + 1);
    const moments = [];
    if (last - first <= 4 * bins) {
      for (let moment = first; moment <= last; moment += 1) moments.push(moment);
      return moments;
    }
    moments.push(first);
    let moment = first + 1;
    for (let bin = 0; bin < bins && moment <= last; bin += 1) {
      const edge = start + ((stop - start) * (bin + 1)) / bins;
      let [from, low, high] = [moment, moment, moment];
      for (; moment <= last && (this.timeOf(moment) < edge || bin === bins - 1); moment += 1) {
        if (this.totals[moment] > this.totals[high]) high = moment;
        if (this.totals[moment] < this.totals[low]) low = moment;
      }
      if (moment === from) continue;
      for (const one of [...new Set([from, Math.min(low, high), Math.max(low, high), moment - 1])]) moments.push(one);
    }
    return moments;
  }
}

/** Sums live storages into a tree: column, module, tensor. Children are sorted by size. */
export function treeOf(live, columns, names) {
  const root = { name: "all", nbytes: 0, depth: 0, parent: null, children: new Map() };
  for (const one of live) {
    const path = [columns[one.column], names[one.module] || "(model)", names[one.tensor] || "(unnamed)"];
    let node = root;
    node.nbytes += one.nbytes;
    for (const [level, name] of path.entries()) {
      if (!node.children.has(name))
        node.children.set(name, {
          name,
          nbytes: 0,
          depth: level + 1,
          column: one.column,
          parent: node,
          children: new Map(),
        });
      node = node.children.get(name);
      node.nbytes += one.nbytes;
    }
  }
  const sorted = (node) => {
    node.children = [...node.children.values()].sort((one, other) => other.nbytes - one.nbytes);
    node.children.forEach(sorted);
    return node;
  };
  return sorted(root);
}
