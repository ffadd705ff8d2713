"use strict";
// Draws the charts of the page from the numbers in #data. Text is only ever set as text.
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);
  const SPACE = "http://www.w3.org/2000/svg";
  const PRINTED = { wide: 690, half: 325 };
  const live = document.getElementById("live");
  const drawn = [];

  // --- elements

  function element(name, parent, kind, text) {
    const made = document.createElement(name);
    if (kind) made.className = kind;
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  function shape(name, attributes, parent, text) {
    const made = document.createElementNS(SPACE, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  function button(parent, kind, text, pressed) {
    const made = element("button", parent, kind, text);
    made.type = "button";
    if (pressed !== undefined) made.setAttribute("aria-pressed", pressed);
    return made;
  }

  // --- numbers

  function written(value, digits = 4) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size !== 0 && size < 1e-4) return value.toExponential(2);
    if (size >= 10 ** digits) return value.toLocaleString("en", { maximumFractionDigits: 0 });
    return value.toLocaleString("en", { maximumSignificantDigits: digits });
  }

  const withUnit = (value, unit) => written(value) + (unit && value !== null ? " " + unit : "");

  function niceStep(span, count) {
    const raw = span / Math.max(count, 1);
    const power = 10 ** Math.floor(Math.log10(raw));
    return power * ([1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999) || 10);
  }

  /** Where a value lies between `from` and `to` on the screen, and the ticks of the axis. */
  function scale(axis, low, high, from, to, room) {
    const count = Math.max(2, Math.floor(Math.abs(to - from) / room));
    return axis.log && high > 0 ? logScale(axis, low, high, from, to, count) : linearScale(axis, low, high, from, to, count);
  }

  function linearScale(axis, low, high, from, to, count) {
    if (axis.low !== undefined) low = Math.min(low, axis.low);
    if (axis.high !== undefined) high = Math.max(high, axis.high);
    if (!(high > low)) [low, high] = [low - (Math.abs(low) || 1) * 0.5, high + (Math.abs(high) || 1) * 0.5];
    const step = niceStep(high - low, count);
    if (axis.rounded) {
      low = Math.floor(low / step + 1e-9) * step;
      high = Math.ceil(high / step - 1e-9) * step;
    }
    const ticks = [];
    const places = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
      const value = i * step || 0; // never -0
      const fixed = { minimumFractionDigits: Math.min(places, 8), maximumFractionDigits: Math.min(places, 8) };
      ticks.push({ value, text: value.toLocaleString("en", fixed) });
    }
    return {
      low, high, ticks,
      at: (value) => from + ((value - low) / (high - low)) * (to - from),
      inverse: (place) => low + ((place - from) / (to - from)) * (high - low),
    };
  }

  function logScale(axis, low, high, from, to, count) {
    low = Math.min(low > 0 ? low : high / 1e3, axis.low || Infinity);
    high = Math.max(high, axis.high || 0);
    if (high / low < 1.5) [low, high] = [low / 1.5, high * 1.5];
    const [first, last] = [Math.log10(low), Math.log10(high)];
    const stride = Math.max(1, Math.ceil((last - first) / (count * 1.4)));
    const ticksAt = (factors) => {
      const ticks = [];
      for (let power = Math.floor(first); power <= Math.ceil(last); power++) {
        for (const factor of factors) {
          const value = factor * 10 ** power;
          if (value < low * 0.999 || value > high * 1.001 || (factor === 1 && power % stride)) continue;
          ticks.push({ value, text: written(value) });
        }
      }
      return ticks;
    };
    const choices = [[1, 1.5, 2, 3, 4, 5, 6, 8], [1, 2, 3, 5], [1, 2, 5], [1, 3], [1]].map(ticksAt);
    const ticks = choices.find((each) => each.length <= Math.max(2, count * 1.5)) || choices[choices.length - 1];
    return {
      low, high, ticks,
      at: (value) => from + ((Math.log10(Math.max(value, low / 10)) - first) / (last - first)) * (to - from),
      inverse: (place) => 10 ** (first + ((place - from) / (to - from)) * (last - first)),
    };
  }

  function extent(lists, positive) {
    let [low, high] = [Infinity, -Infinity];
    for (const list of lists) {
      for (const value of list || []) {
        if (value === null || (positive && value <= 0)) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    return low <= high ? [low, high] : [0, 1];
  }

  /** The place of the last value that is not above `wanted`, in an ascending list; -1 before the first. */
  function lastBefore(list, wanted) {
    let [low, high] = [0, list.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle] <= wanted) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  function nearest(series, wanted) {
    const i = lastBefore(series.x, wanted);
    if (series.style === "step" || i < 0) return Math.max(i, 0);
    const next = Math.min(i + 1, series.x.length - 1);
    return wanted - series.x[i] > series.x[next] - wanted ? next : i;
  }

  // --- marks: a shape for each colour, so that neither has to be told apart alone

  const MARKS = [
    (x, y, r) => `M${x - r},${y}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`,
    (x, y, r) => `M${x},${y - r * 1.25}L${x + r * 1.2},${y + r * 0.85}H${x - r * 1.2}Z`,
    (x, y, r) => `M${x},${y - r * 1.3}L${x + r * 1.3},${y}L${x},${y + r * 1.3}L${x - r * 1.3},${y}Z`,
    (x, y, r) => `M${x - r * 0.9},${y - r * 0.9}h${r * 1.8}v${r * 1.8}h${-r * 1.8}Z`,
    (x, y, r) => `M${x},${y + r * 1.25}L${x + r * 1.2},${y - r * 0.85}H${x - r * 1.2}Z`,
    (x, y, r) => `M${x - r * 1.2},${y - r * 0.5}h${r * 2.4}v${r}h${-r * 2.4}Z`,
    (x, y, r) => `M${x - r * 0.5},${y - r * 1.2}h${r}v${r * 2.4}h${-r}Z`,
    (x, y, r) => `M${x - r},${y - r * 0.4}v${r * 0.8}l${r * 0.6},${r * 0.6}h${r * 0.8}l${r * 0.6},${-r * 0.6}v${-r * 0.8}l${-r * 0.6},${-r * 0.6}h${-r * 0.8}Z`,
  ];
  const mark = (kind, x, y, r) => MARKS[kind % MARKS.length](x, y, r);
  const isMarked = (series) => series.style === "line" && series.x.length <= 32 && !(series.dash && series.x.length === 2);
  const dashed = (series) => (series.dash ? ` d${series.dash}` : "");

  // --- paths

  const short = (value) => Math.round(value * 10) / 10;

  function linePath(series, across, up) {
    let path = "", open = false, before = 0;
    series.x.forEach((x, i) => {
      const y = series.y[i];
      if (x === null || y === null) { open = false; return; }
      const [px, py] = [short(across.at(x)), short(up.at(y))];
      if (!open) path += `M${px},${py}`;
      else if (series.style === "step") path += `H${px}V${py}`;
      else path += `L${px},${py}`;
      [open, before] = [true, py];
    });
    return path;
  }

  function areaPath(xs, low, high, across, up) {
    const corner = (values) => (i) => `${short(across.at(xs[i]))},${short(up.at(values[i]))}`;
    return unbroken(high).map((places) => {
      const [there, back] = [places.map(corner(high)), places.map(corner(low)).reverse()];
      return `M${there.join("L")}L${back.join("L")}Z`;
    }).join("");
  }

  /** The places of values that follow each other, in lists of as many as there are without one that is not known. */
  function unbroken(values) {
    const lists = [[]];
    values.forEach((value, i) => {
      if (value !== null) lists[lists.length - 1].push(i);
      else lists.push([]);
    });
    return lists.filter((places) => places.length);
  }

  function stacked(pane, hidden) {
    const shown = pane.series.filter((series) => !hidden.has(series.name));
    let under = (shown[0] ? shown[0].x : []).map(() => 0);
    return shown.map((series) => {
      const over = under.map((value, i) => (value === null || series.y[i] === null ? null : value + series.y[i]));
      const layer = { series, low: under, high: over };
      under = over;
      return layer;
    });
  }

  // --- what pointing and the keyboard share

  /** A box with a heading and rows of [colour, name, value], beside a place of the plot. */
  function showTip(state, head, rows, x, y) {
    const tip = state.tip || (state.tip = element("div", state.plot, "tip"));
    tip.replaceChildren();
    tip.hidden = false;
    element("b", tip, "", head);
    for (const [colour, name, value] of rows) {
      const row = element("div", tip);
      if (colour !== null) element("i", row, "b" + colour);
      element("span", row, "", name);
      element("em", row, "", value);
    }
    const [width, height] = [tip.offsetWidth, tip.offsetHeight];
    const left = x + 14 + width > state.width ? Math.max(0, x - 14 - width) : x + 14;
    tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(Math.max(0, Math.min(y, state.height - height)))}px)`;
  }

  function hideTip(state) {
    if (state.tip) state.tip.hidden = true;
  }

  function say(head, rows) {
    live.textContent = [head, ...rows.map(([, name, value]) => `${name}: ${value}`)].join(", ");
  }

  // --- panes: lines, stacks and lanes over one axis

  const LANE = 21;

  function drawPanes(state) {
    const { chart, plot, hidden } = state;
    const width = state.width, narrow = width < 480;
    const [left, right] = [narrow ? 42 : 50, narrow ? 8 : 12];
    const lines = chart.panes.filter((pane) => pane.kind !== "lane");
    const lanes = chart.panes.filter((pane) => pane.kind === "lane");
    const xs = [...lines.flatMap((pane) => pane.series.map((s) => s.x)), ...lanes.flatMap((lane) => [lane.starts, lane.ends])];
    const across = scale(chart.x, ...extent(xs, chart.x.log), left, width - right, narrow ? 54 : 62);
    let top = 0;
    const places = chart.panes.map((pane, i) => {
      const height = pane.kind === "lane" ? LANE : Math.round(pane.height * (state.printing ? 0.72 : narrow ? 0.88 : 1));
      const place = { top: top + (pane.kind === "lane" ? 20 : 27), height };
      const next = chart.panes[i + 1];
      top = place.top + height + (pane.kind === "lane" ? 6 : next && next.kind === "lane" ? 10 : 14);
      return place;
    });
    const bottom = places[places.length - 1].top + places[places.length - 1].height;
    state.height = bottom + 40;
    const root = freshSvg(state);
    for (const tick of across.ticks) {
      const x = short(across.at(tick.value));
      const reach = chart.panes.map((pane, i) => [pane, places[i]]).filter(([pane]) => pane.kind !== "lane");
      for (const [, place] of reach) shape("line", { class: "grid", x1: x, x2: x, y1: place.top, y2: place.top + place.height }, root);
      shape("text", { x, y: bottom + 17, "text-anchor": "middle" }, root, tick.text);
    }
    shape("line", { class: "axis", x1: left, x2: width - right, y1: bottom + 0.5, y2: bottom + 0.5 }, root);
    shape("text", { class: "title", x: width - right, y: bottom + 34, "text-anchor": "end" }, root, chart.x.title + " →");
    state.ups = chart.panes.map((pane, i) => {
      if (pane.kind === "lane") return drawLane(root, pane, places[i], across, left);
      return drawPane(root, pane, places[i], across, left, width - right, hidden, narrow);
    });
    state.cursor = shape("line", { class: "cursor", y1: places[0].top, y2: bottom, visibility: "hidden" }, root);
    state.dots = shape("g", {}, root);
    Object.assign(state, { across, left, right: width - right, places });
  }

  function drawPane(root, pane, place, across, left, right, hidden, narrow) {
    const shown = pane.series.filter((series) => !hidden.has(series.name));
    const layers = pane.kind === "stack" ? stacked(pane, hidden) : [];
    const measured = layers.length ? layers.map((layer) => layer.high) : shown.flatMap((s) => [s.y, s.low, s.high]);
    const bottom = place.top + place.height;
    let [low, high] = extent(measured, pane.y.log);
    if (pane.y.log) [low, high] = [low / 1.12, high * 1.12];
    const up = scale({ ...pane.y, rounded: true }, low, high, bottom, place.top, narrow ? 34 : 40);
    shape("text", { class: "title", x: 0, y: place.top - 13 }, root, pane.y.title);
    for (const tick of up.ticks) {
      const y = short(up.at(tick.value));
      shape("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }, root);
      shape("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, root, tick.text);
    }
    for (const layer of layers) {
      const area = areaPath(layer.series.x, layer.low, layer.high, across, up);
      shape("path", { class: `layer f${layer.series.colour}`, d: area }, root);
    }
    if (!layers.length) for (const series of shown) drawSeries(root, series, across, up);
    return up;
  }

  function drawSeries(root, series, across, up) {
    if (series.low) {
      shape("path", { class: `around f${series.colour}`, d: areaPath(series.x, series.low, series.high, across, up) }, root);
    }
    if (series.style === "dots") {
      const path = series.x.map((x, i) => mark(0, short(across.at(x)), short(up.at(series.y[i])), 2.6)).join("");
      shape("path", { class: `cloud f${series.colour}`, d: path }, root);
      return;
    }
    const kind = `stroke s${series.colour}${dashed(series)}${series.thick ? " thick" : ""}`;
    shape("path", { class: kind, d: linePath(series, across, up) }, root);
    if (isMarked(series)) {
      series.x.forEach((x, i) => {
        if (series.y[i] === null) return;
        shape("path", { class: `dot f${series.colour}`, d: mark(series.colour, short(across.at(x)), short(up.at(series.y[i])), 3.1) }, root);
      });
    }
  }

  function drawLane(root, lane, place, across, left) {
    shape("text", { class: "title", x: 0, y: place.top - 6 }, root, lane.title);
    lane.which.forEach((name, i) => {
      const [from, to] = [across.at(lane.starts[i]), across.at(lane.ends[i])];
      const width = Math.max(to - from, 0.7);
      shape("rect", { class: `stretch f${lane.colours[name]}`, x: short(from), y: place.top, width: short(width), height: place.height, rx: width > 6 ? 2 : 0 }, root);
      if (width < 24) return;
      const label = shape("text", { class: "on", x: short(from + 7), y: place.top + 15 }, root, lane.names[name]);
      if (label.getComputedTextLength() + 12 > width) label.remove();
    });
    return null;
  }

  /** All that is known at a place of the common axis. */
  function readPanes(state, wanted) {
    const rows = [], points = [];
    let snapped = null;
    state.chart.panes.forEach((pane, p) => {
      if (pane.kind === "lane") {
        const i = Math.min(Math.max(lastBefore(pane.starts, wanted), 0), pane.which.length - 1);
        const inGap = i + 1 < pane.which.length && wanted > pane.ends[i];
        rows.push([inGap ? null : pane.colours[pane.which[i]], pane.title, inGap ? written(null) : pane.names[pane.which[i]]]);
        return;
      }
      let sum = 0;
      for (const series of pane.series) {
        if (state.hidden.has(series.name) || !series.x.length) continue;
        const i = nearest(series, wanted);
        const several = state.chart.panes.length > 1;
        if (series.x.length > 2 && (snapped === null || Math.abs(series.x[i] - wanted) < Math.abs(snapped - wanted)) && series.style !== "step") snapped = series.x[i];
        const label = several ? (pane.series.length > 1 ? `${pane.y.title.split(/[,(]/)[0].trim()}, ${series.name}` : series.name) : series.name;
        rows.push([series.colour, label, withUnit(series.y[i], pane.y.unit)]);
        sum = sum === null || series.y[i] === null ? null : sum + series.y[i];
        if (pane.kind !== "stack" && series.y[i] !== null) points.push([series, series.style === "step" ? wanted : series.x[i], series.y[i], state.ups[p]]);
      }
      if (pane.kind === "stack") rows.push([null, "together", withUnit(sum, pane.y.unit)]);
    });
    return { rows, points, at: snapped === null ? wanted : snapped };
  }

  function pointPanes(state, wanted, alone) {
    const found = readPanes(state, wanted);
    const place = alone ? found.at : wanted;
    const x = short(state.across.at(place));
    state.at = place;
    state.cursor.setAttribute("x1", x);
    state.cursor.setAttribute("x2", x);
    state.cursor.setAttribute("visibility", "visible");
    state.dots.replaceChildren();
    for (const [series, px, py, up] of found.points) {
      if (px < state.across.low || px > state.across.high) continue;
      shape("circle", { class: `dot f${series.colour}`, cx: short(state.across.at(px)), cy: short(up.at(py)), r: 4 }, state.dots);
    }
    const head = withUnit(place, state.chart.x.unit);
    if (alone) showTip(state, head, found.rows, x, state.pointerY === undefined ? 12 : state.pointerY);
    return [head, found.rows];
  }

  function leavePanes(state) {
    hideTip(state);
    if (state.cursor) state.cursor.setAttribute("visibility", "hidden");
    if (state.dots) state.dots.replaceChildren();
  }

  function companions(state) {
    const group = state.chart.group;
    return group ? drawn.filter((other) => other !== state && other.chart.group === group && other.run === state.run && other.across) : [];
  }

  function listenPanes(state) {
    const { plot } = state;
    const move = (event) => {
      const box = plot.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * state.width;
      if (x < state.left - 8 || x > state.right + 8) { leave(); return; }
      state.pointerY = event.clientY - box.top + 14;
      pointPanes(state, state.across.inverse(Math.min(Math.max(x, state.left), state.right)), true);
      for (const other of companions(state)) pointPanes(other, state.at, false);
    };
    const leave = () => { leavePanes(state); companions(state).forEach(leavePanes); };
    plot.addEventListener("pointermove", move);
    plot.addEventListener("pointerdown", move);
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("blur", leave);
    plot.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { leave(); return; }
      const stops = steppingPlaces(state);
      let i = state.at === undefined ? -1 : lastBefore(stops, state.at + 1e-9);
      const stride = event.shiftKey ? Math.max(1, Math.round(stops.length / 10)) : 1;
      if (event.key === "ArrowRight") i += stride;
      else if (event.key === "ArrowLeft") i -= stride;
      else if (event.key === "Home") i = 0;
      else if (event.key === "End") i = stops.length - 1;
      else return;
      event.preventDefault();
      state.pointerY = 12;
      const wanted = stops[Math.min(Math.max(i, 0), stops.length - 1)];
      say(...pointPanes(state, wanted, true));
      for (const other of companions(state)) pointPanes(other, state.at, false);
    });
  }

  /** Where the arrow keys stop: at the points of the finest series, or the stretches of the finest lane. */
  function steppingPlaces(state) {
    const lists = state.chart.panes.flatMap((pane) => (pane.kind === "lane" ? [pane.starts] : pane.series.map((s) => s.x)));
    return lists.reduce((longest, list) => (list.length > longest.length ? list : longest), []);
  }

  function legendPanes(state) {
    const seen = new Set();
    for (const pane of state.chart.panes) {
      if (pane.kind === "lane") continue;
      for (const series of pane.series) {
        if (seen.has(series.name)) continue;
        seen.add(series.name);
        const key = button(state.legend, "key", undefined, true);
        swatch(key, series, pane.kind);
        element("span", key, "", series.name);
        key.title = "Show or hide";
        key.addEventListener("click", () => {
          const hide = !state.hidden.has(series.name);
          if (hide) state.hidden.add(series.name);
          else state.hidden.delete(series.name);
          key.setAttribute("aria-pressed", !hide);
          draw(state);
        });
      }
    }
    for (const lane of state.chart.panes.filter((pane) => pane.kind === "lane")) {
      lane.names.forEach((name, i) => {
        const key = element("span", state.legend, "key");
        const picture = shape("svg", { viewBox: "0 0 22 12", "aria-hidden": "true" }, key);
        shape("rect", { class: "f" + lane.colours[i], x: 4, y: 1, width: 14, height: 10, rx: 2 }, picture);
        element("span", key, "", name);
      });
    }
  }

  function swatch(key, series, kind) {
    const picture = shape("svg", { viewBox: "0 0 22 12", "aria-hidden": "true" }, key);
    if (kind === "stack") {
      shape("rect", { class: `layer f${series.colour}`, x: 4, y: 1, width: 14, height: 10, rx: 2 }, picture);
    } else if (series.style === "dots") {
      shape("path", { class: `cloud f${series.colour}`, d: mark(0, 6, 7, 3) + mark(0, 15, 5, 3) }, picture);
    } else {
      shape("path", { class: `stroke s${series.colour}${dashed(series)}${series.thick ? " thick" : ""}`, d: "M0,6H22" }, picture);
      if (isMarked(series)) {
        shape("path", { class: `dot f${series.colour}`, d: mark(series.colour, 11, 6, 3.1) }, picture);
      }
    }
  }

  // --- the front: one decision at a time

  function buildFront(state) {
    const { chart, figure, plot } = state;
    state.chosen = Math.max(chart.decisions.findIndex((decision) => decision.changed), 0);
    chart.exchanges.forEach((exchange) => {
      const key = element("span", state.legend, "key");
      const picture = shape("svg", { viewBox: "0 0 22 12", "aria-hidden": "true" }, key);
      shape("path", { class: "f" + exchange.colour, d: mark(exchange.colour, 11, 6, 4.5) }, picture);
      element("span", key, "", exchange.name);
    });
    const chooser = element("div", null, "chooser");
    const back = button(chooser, "", "‹ Earlier");
    const slider = element("input", chooser);
    Object.assign(slider, { type: "range", min: 0, max: chart.decisions.length - 1, step: 1, value: state.chosen });
    slider.setAttribute("aria-label", "Decision");
    const on = button(chooser, "", "Later ›");
    const count = element("output", chooser);
    const reason = element("div", null, "reason");
    plot.before(chooser, reason);
    const choose = (wanted) => {
      state.chosen = Math.min(Math.max(wanted, 0), chart.decisions.length - 1);
      const decision = chart.decisions[state.chosen];
      slider.value = state.chosen;
      slider.setAttribute("aria-valuetext", `${decision.head}: ${decision.what}, because ${decision.why}`);
      count.textContent = `${state.chosen + 1} of ${chart.decisions.length}`;
      reason.replaceChildren();
      element("b", reason, "", `${decision.head}: ${decision.what}`);
      element("span", reason, "", `because ${decision.why}`);
      element("span", reason, "", `Seen: ${decision.seen}. Expected step: ${decision.expected}.`);
      if (state.width) draw(state);
    };
    slider.addEventListener("input", () => choose(Number(slider.value)));
    back.addEventListener("click", () => choose(state.chosen - 1));
    on.addEventListener("click", () => choose(state.chosen + 1));
    if (chart.decisions.length === 1) chooser.hidden = true;
    choose(state.chosen);
    figure.classList.add("front");
  }

  function drawFront(state) {
    const { chart } = state;
    const width = state.width, narrow = width < 480;
    const [left, right, top, tall] = [narrow ? 34 : 40, 14, 30, state.printing ? 200 : narrow ? 250 : 290];
    state.height = top + tall + 40;
    const root = freshSvg(state);
    const decision = chart.decisions[state.chosen];
    const [low, high] = extent([decision.x], true);
    const [least] = extent(chart.decisions.map((decision) => decision.y));
    const across = scale(chart.x, low / 1.2, high * 1.2, left, width - right, narrow ? 54 : 70);
    const up = scale({}, Math.max(0, Math.floor(least * 10 - 0.5) / 10), 1.03, top + tall, top, 44);
    shape("text", { class: "title", x: 0, y: 12 }, root, "↑ " + chart.y.title);
    for (const tick of up.ticks) {
      const y = short(up.at(tick.value));
      shape("line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y }, root);
      shape("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, root, tick.text);
    }
    for (const tick of across.ticks) {
      const x = short(across.at(tick.value));
      shape("line", { class: "grid", x1: x, x2: x, y1: top, y2: top + tall }, root);
      shape("text", { x, y: top + tall + 17, "text-anchor": "middle" }, root, tick.text);
    }
    shape("line", { class: "axis", x1: left, x2: width - right, y1: top + tall + 0.5, y2: top + tall + 0.5 }, root);
    shape("text", { class: "title", x: width - right, y: top + tall + 34, "text-anchor": "end" }, root, chart.x.title + " →");
    const places = decision.x.map((x, i) => [short(across.at(x)), short(up.at(decision.y[i]))]);
    const corners = decision.front.map((i) => places[i]);
    if (corners.length > 1) {
      const path = corners.map(([x, y], i) => (i ? `H${x}V${y}` : `M${x},${y}`)).join("");
      shape("path", { class: "frontier", d: path }, root);
    }
    const order = [...places.keys()].sort((a, b) => decision.front.includes(a) - decision.front.includes(b));
    for (const i of order) {
      const colour = chart.exchanges[decision.exchange[i]].colour;
      const kind = decision.front.includes(i) ? `f${colour} dot` : `hollow s${colour}`;
      shape("path", { class: kind, d: mark(colour, ...places[i], 5) }, root);
    }
    if (decision.chosen >= 0) {
      const [x, y] = places[decision.chosen];
      const name = chart.names[decision.name[decision.chosen]];
      shape("circle", { class: "ring", cx: x, cy: y, r: 10.5 }, root);
      const [labelX, labelY] = freeSpot(places, decision.chosen, name.length * 7, left, width, top, top + tall);
      shape("text", { class: "label", x: short(labelX), y: short(labelY) }, root, name);
    }
    state.focus = shape("circle", { class: "ring", r: 8, visibility: "hidden" }, root);
    Object.assign(state, { points: places });
  }

  /** Where a label of some width covers the fewest other points: beside, above or below its own. */
  function freeSpot(places, own, wide, left, right, top, bottom) {
    const [x, y] = places[own];
    const spots = [[x + 16, y + 4], [x - 16 - wide, y + 4], [x - wide / 2, y - 17], [x - wide / 2, y + 26], [x + 12, y - 14], [x + 12, y + 24], [x - 12 - wide, y - 14], [x - 12 - wide, y + 24]];
    let best = spots[0], least = Infinity;
    for (const [from, base] of spots) {
      const at = Math.min(Math.max(from, left), right - wide);
      const covered = places.filter(([px, py], i) => i !== own && px > at - 7 && px < at + wide + 7 && py > base - 18 && py < base + 9).length;
      const cost = covered * 3 + (at !== from ? 2 : 0) + (base < top + 4 || base > bottom - 4 ? 5 : 0);
      if (cost < least) [best, least] = [[at, base], cost];
    }
    return best;
  }

  function pointFront(state, i) {
    const decision = state.chart.decisions[state.chosen];
    const [x, y] = state.points[i];
    const rows = [
      [state.chart.exchanges[decision.exchange[i]].colour, "predicted step", withUnit(decision.x[i], state.chart.x.unit)],
      [null, "gain", written(decision.y[i])],
      [null, "cost, per dense step", withUnit(decision.cost[i], state.chart.x.unit)],
    ];
    const role = i === decision.chosen ? " (chosen)" : decision.front.includes(i) ? " (on the front)" : "";
    const head = state.chart.names[decision.name[i]] + role;
    state.focused = i;
    for (const [key, value] of [["cx", x], ["cy", y], ["visibility", "visible"]]) state.focus.setAttribute(key, value);
    showTip(state, head, rows, x, y + 12);
    return [head, rows];
  }

  function listenFront(state) {
    const { plot } = state;
    const leave = () => { hideTip(state); if (state.focus) state.focus.setAttribute("visibility", "hidden"); };
    const move = (event) => {
      const box = plot.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * state.width, y = event.clientY - box.top;
      let best = -1, least = 34 ** 2;
      state.points.forEach(([px, py], i) => {
        const away = (px - x) ** 2 + (py - y) ** 2;
        if (away < least) [best, least] = [i, away];
      });
      if (best < 0) leave();
      else pointFront(state, best);
    };
    plot.addEventListener("pointermove", move);
    plot.addEventListener("pointerdown", move);
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("blur", leave);
    plot.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { leave(); return; }
      const order = state.points.map((_, i) => i).sort((a, b) => state.points[a][0] - state.points[b][0]);
      let i = order.indexOf(state.focused);
      if (event.key === "ArrowRight") i += 1;
      else if (event.key === "ArrowLeft") i -= 1;
      else return;
      event.preventDefault();
      say(...pointFront(state, order[Math.min(Math.max(i, 0), order.length - 1)]));
    });
  }

  // --- bars

  function legendBars(state) {
    if (!state.chart.sent) return;
    for (const [fill, name] of [["f0", "sent"], ["f7", "dense"]]) {
      const key = element("span", state.legend, "key");
      const picture = shape("svg", { viewBox: "0 0 22 12", "aria-hidden": "true" }, key);
      shape("rect", { class: fill, x: 0, y: 3, width: 22, height: 6, rx: 3 }, picture);
      element("span", key, "", name);
    }
  }

  function drawBars(state) {
    const { chart } = state;
    const width = state.width, row = chart.sent ? 40 : 31;
    state.height = chart.names.length * row + 4;
    const root = freshSvg(state);
    const kinds = chart.sent ? [[chart.sent, "f0"], [chart.shares, "f7"]] : [[chart.shares, "f0"]];
    const largest = Math.max(...kinds.flatMap(([shares]) => shares), 1e-9);
    chart.names.forEach((name, i) => {
      const top = i * row;
      const room = Math.floor((width - chart.labels[i].length * 6.4 - 14) / 6.6);
      const shown = name.length <= room ? name : name.slice(0, Math.ceil(room / 2) - 1) + "…" + name.slice(name.length - Math.floor(room / 2));
      shape("text", { class: "name", x: 0, y: top + 13 }, root, shown);
      shape("text", { class: "value", x: width, y: top + 13, "text-anchor": "end" }, root, chart.labels[i]);
      kinds.forEach(([shares, fill], k) => {
        const y = top + 19 + 8 * k;
        shape("rect", { class: "track", x: 0, y, width, height: 6, rx: 3 }, root);
        shape("rect", { class: fill, x: 0, y, width: short(Math.max((width * shares[i]) / largest, 2)), height: 6, rx: 3 }, root);
      });
    });
  }

  // --- drawing

  const KINDS = {
    panes: { build: legendPanes, draw: drawPanes, listen: listenPanes },
    front: { build: buildFront, draw: drawFront, listen: listenFront },
    bars: { build: legendBars, draw: drawBars, listen: (state) => state.plot.removeAttribute("tabindex") },
  };

  function freshSvg(state) {
    if (state.svg) state.svg.remove();
    state.svg = shape("svg", { viewBox: `0 0 ${state.width} ${state.height}`, "aria-hidden": "true" });
    state.plot.prepend(state.svg);
    return state.svg;
  }

  function draw(state, width) {
    const room = width || state.plot.clientWidth;
    if (!room) { state.stale = true; return; }
    state.width = room;
    state.stale = false;
    hideTip(state);
    KINDS[state.chart.kind].draw(state);
    state.figure.dataset.drawn = "yes";
  }

  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const chart = charts[Number(figure.dataset.chart)];
    const panel = figure.closest(".run");
    const state = {
      chart, figure, hidden: new Set(), run: panel ? panel.id : "",
      plot: figure.querySelector(".plot"), legend: figure.querySelector(".legend"),
    };
    KINDS[chart.kind].build(state);
    draw(state);
    KINDS[chart.kind].listen(state);
    drawn.push(state);
  }

  let waiting = false;
  const redraw = () => {
    waiting = false;
    for (const state of drawn) if (state.plot.clientWidth && (state.stale || state.plot.clientWidth !== state.width)) draw(state);
  };
  const later = () => { if (!waiting) { waiting = true; requestAnimationFrame(redraw); } };
  new ResizeObserver(later).observe(document.querySelector("main"));
  addEventListener("beforeprint", () => {
    for (const state of drawn.filter((each) => each.plot.clientWidth)) {
      state.printing = true;
      draw(state, state.figure.classList.contains("wide") ? PRINTED.wide : PRINTED.half);
    }
  });
  addEventListener("afterprint", () => {
    for (const state of drawn) state.printing = false;
    redraw();
  });

  // --- runs of a compare: one at a time

  const tabs = [...document.querySelectorAll('[role="tab"]')];
  function select(tab, focus) {
    for (const other of tabs) {
      const on = other === tab;
      other.setAttribute("aria-selected", on);
      other.tabIndex = on ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).hidden = !on;
    }
    if (focus) tab.focus();
    redraw();
  }
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) select(tabs[(i + step + tabs.length) % tabs.length], true);
    });
  });
  const first = tabs.find((tab) => tab.dataset.first !== undefined) || tabs[0];
  if (first) select(first);

  // --- light and dark

  const theme = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
  const label = () => { theme.textContent = isDark() ? "☀ Light" : "☾ Dark"; };
  theme.hidden = false;
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    label();
  });
  dark.addEventListener("change", label);
  label();
  document.documentElement.dataset.ready = String(drawn.filter((state) => state.figure.dataset.drawn).length);
})();
