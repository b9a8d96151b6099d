"use strict";
// The timeline: four tracks on a canvas, a strip of all steps above. Times are microseconds.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("timeline"), strip = document.getElementById("overview");
  const tip = document.getElementById("tip");
  const names = Object.keys(data.tracks);
  const LEFT = 92, TOP = 46, LANE = 42, GAP = 14;
  const all = [0, 1];
  for (const name of names) for (const slice of data.tracks[name]) all[1] = Math.max(all[1], slice[1]);
  // By track: step to slice, for arrows.
  const at = names.map((name) => new Map(data.tracks[name].map((slice) => [slice[2], slice])));
  let view = [...data.view], hovered = -1, drag = null, queued = false;
  const margin = (view[1] - view[0]) * 0.02;
  view = [view[0] - margin, view[1] + margin];

  const time = (us) => Math.abs(us) < 1000 ? us.toFixed(us < 10 && us > -10 ? 1 : 0) + " µs"
    : Math.abs(us) < 1e6 ? (us / 1000).toFixed(2) + " ms" : (us / 1e6).toFixed(3) + " s";
  // A mark of the axis, with the digits that tell it from its neighbours.
  function label(us, step) {
    const [unit, name] = Math.abs(view[1]) < 1000 ? [1, " µs"] : Math.abs(view[1]) < 1e6 ? [1000, " ms"] : [1e6, " s"];
    return (us / unit).toFixed(Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9))) + name;
  }
  const word = (column, place) => data.words[column][data[column][place]] || "-";
  const laneTop = (track) => TOP + track * (LANE + GAP);

  function fit(target) {
    const ratio = window.devicePixelRatio || 1, box = target.getBoundingClientRect();
    target.width = Math.round(box.width * ratio);
    target.height = Math.round(box.height * ratio);
    const pen = target.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, box.width, box.height);
    pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    return [pen, box.width, box.height];
  }

  // The first slice that ends after `when`: slices of a track are in order and never overlap.
  function firstAfter(slices, when) {
    let low = 0, high = slices.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (slices[middle][1] > when) high = middle; else low = middle + 1;
    }
    return low;
  }

  function axis(pen, width, x) {
    const rough = (view[1] - view[0]) / (width / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
    pen.textAlign = "center";
    for (let mark = Math.ceil(view[0] / step) * step; mark <= view[1]; mark += step) {
      pen.fillStyle = "#e6ebef";
      pen.fillRect(x(mark), 20, 1, 290);
      pen.fillStyle = "#5b6a79";
      pen.fillText(label(mark, step), x(mark), 14);
    }
  }

  // `least`: pixels that a slice has at least; a copy of a few microseconds should still be seen.
  function slice(pen, track, one, x, least) {
    const [begin, end, step] = one;
    let from = Math.max(x(begin), LEFT), wide = x(end) - from;
    if (wide <= 0) return;
    if (wide < least) [from, wide] = [Math.round(from), least];
    const top = laneTop(track), name = names[track];
    pen.fillStyle = data.colours[name];
    pen.globalAlpha = name === "forward" && data.estimated[step] ? 0.4 : 1;
    pen.fillRect(from, top, wide, LANE);
    pen.globalAlpha = 1;
    if (name === "processing" && data.wait[step] > 0) {
      const waited = x(Math.min(begin + data.wait[step], end)) - from;
      if (waited > 0) {
        pen.fillStyle = "#ddb4d6";
        pen.fillRect(from, top, waited, LANE);
      }
    }
    if (wide > 3) {
      pen.strokeStyle = step === hovered ? "#000" : "#ffffff";
      pen.lineWidth = step === hovered ? 2 : 1;
      pen.strokeRect(from + 0.5, top + 0.5, wide - 1, LANE - 1);
    }
    const text = track < 2 ? word("forward", step) + " " + data.rows[step] : "";
    if (text && wide > pen.measureText(text).width + 10) {
      pen.fillStyle = track === 1 && data.estimated[step] ? "#1c2733" : "#fff";
      pen.textAlign = "left";
      pen.fillText(text, from + 5, top + LANE / 2 + 4);
    }
  }

  function arrow(pen, step, x, strong) {
    const from = at[0].get(step), to = at[names.length - 1].get(step);
    if (!from || !to || x(to[0]) < LEFT || x(from[1]) > x(view[1])) return;
    const x0 = Math.max(x(from[1]), LEFT), y0 = laneTop(0) + LANE, x1 = x(to[0]), y1 = laneTop(names.length - 1);
    pen.strokeStyle = pen.fillStyle = strong ? "#000" : "rgba(28,39,51,.55)";
    pen.lineWidth = strong ? 2 : 1.2;
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.bezierCurveTo(x0, y0 + 50, x1, y1 - 50, x1, y1 - 5);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(x1, y1);
    pen.lineTo(x1 - 4, y1 - 8);
    pen.lineTo(x1 + 4, y1 - 8);
    pen.fill();
  }

  function instants(pen, x) {
    let free = LEFT;
    pen.textAlign = "left";
    for (const [when, text] of data.instants) {
      const place = x(when);
      if (place < LEFT || when > view[1]) continue;
      pen.fillStyle = "#8a3000";
      pen.fillRect(place, 24, 1.5, TOP - 26);
      if (place >= free) {
        pen.fillText(text, place + 4, 35);
        free = place + pen.measureText(text).width + 16;
      }
    }
  }

  function draw() {
    queued = false;
    const [pen, width] = fit(canvas);
    const scale = (width - LEFT) / (view[1] - view[0]), x = (when) => LEFT + (when - view[0]) * scale;
    axis(pen, width, x);
    let seen = 0;
    const visible = names.map((name) => {
      const slices = data.tracks[name], from = firstAfter(slices, view[0]);
      let to = from;
      while (to < slices.length && slices[to][0] < view[1]) to++;
      seen = Math.max(seen, to - from);
      return slices.slice(from, to);
    });
    // Closer than this, arrows are a grey cloud and wider slices a false solid bar.
    const apart = seen && (width - LEFT) / seen > 16;
    visible.forEach((slices, track) => slices.forEach((one) => slice(pen, track, one, x, apart ? 2 : 0)));
    if (apart) for (const one of visible[0]) arrow(pen, one[2], x, false);
    if (hovered >= 0) arrow(pen, hovered, x, true);
    instants(pen, x);
    pen.fillStyle = "#fff";
    pen.fillRect(0, 0, LEFT, 300);
    pen.fillStyle = "#1c2733";
    pen.textAlign = "right";
    names.forEach((name, track) => pen.fillText(name, LEFT - 10, laneTop(track) + LANE / 2 + 4));
    overview();
  }

  function overview() {
    const [pen, width, height] = fit(strip), scale = (width - LEFT) / (all[1] - all[0]);
    pen.fillStyle = "#eef1f4";
    pen.fillRect(LEFT, 0, width - LEFT, height);
    // Runs of one path as one bar: steps narrower than a pixel would mix with the ground.
    let run = null;
    const paint = () => {
      if (!run) return;
      pen.fillStyle = data.paths[run.path] || "#999";
      pen.fillRect(LEFT + run.from * scale, 4, Math.max((run.to - run.from) * scale, 0.4), height - 8);
    };
    for (const [begin, end, step] of data.tracks[names[0]]) {
      const path = word("path", step), processed = at[names.length - 1].get(step);
      if (!run || run.path !== path || (begin - run.to) * scale > 0.5) {
        if (run) run.to = Math.min(run.to, begin);
        paint();
        run = { path, from: begin, to: end };
      }
      run.to = Math.max(run.to, end, processed ? processed[1] : 0);
    }
    paint();
    pen.strokeStyle = "#000";
    pen.lineWidth = 1.5;
    pen.strokeRect(LEFT + Math.max(view[0], 0) * scale, 1,
      Math.max((Math.min(view[1], all[1]) - Math.max(view[0], 0)) * scale, 4), height - 2);
    pen.fillStyle = "#5b6a79";
    pen.textAlign = "right";
    pen.fillText("all steps", LEFT - 10, 16);
  }

  const later = () => { if (!queued) { queued = true; requestAnimationFrame(draw); } };
  const span = () => view[1] - view[0];

  function show(begin, length) {
    length = Math.min(Math.max(length, 5), (all[1] - all[0]) * 1.04);
    begin = Math.min(Math.max(begin, all[0] - length * 0.5), all[1] - length * 0.5);
    view = [begin, begin + length];
    later();
  }
  function zoom(factor, around) {
    const fixed = around === undefined ? (view[0] + view[1]) / 2 : around;
    show(fixed - (fixed - view[0]) * factor, span() * factor);
  }
  const everything = () => show(all[0] - (all[1] - all[0]) * 0.02, (all[1] - all[0]) * 1.04);
  const when = (event) => {
    const box = canvas.getBoundingClientRect();
    return view[0] + (event.clientX - box.left - LEFT) / (box.width - LEFT) * span();
  };

  function found(event) {
    const y = event.clientY - canvas.getBoundingClientRect().top, moment = when(event);
    const track = names.findIndex((_, place) => y >= laneTop(place) && y < laneTop(place) + LANE);
    if (track < 0 || moment < view[0]) return null;
    const slices = data.tracks[names[track]], one = slices[firstAfter(slices, moment)];
    return one && one[0] <= moment ? [track, one] : null;
  }

  function describe([track, [begin, end, step]]) {
    const lines = [`step ${data.step[step]}: ${word("forward", step)}, ${data.rows[step]} requests`,
      `${names[track]} ${time(end - begin)}`, `path ${word("path", step)}, ${word("reason", step)}`];
    if (data.block[step]) lines.push(`held up by ${word("block", step)}`);
    if (names[track] === "processing") lines.push(`of it waiting ${time(data.wait[step])}`);
    if (names[track] === "forward" && data.estimated[step]) lines.push("estimated: this step was not sampled");
    return lines.join("\n");
  }

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(1.0015 ** event.deltaY, when(event));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    drag = [event.clientX, view[0]];
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const width = canvas.getBoundingClientRect().width - LEFT;
      show(drag[1] - (event.clientX - drag[0]) / width * span(), span());
      return;
    }
    const hit = found(event);
    if ((hit ? hit[1][2] : -1) !== hovered) later();
    hovered = hit ? hit[1][2] : -1;
    tip.hidden = !hit;
    if (hit) {
      tip.textContent = describe(hit);
      tip.style.left = Math.min(event.clientX + 14, window.innerWidth - 290) + "px";
      tip.style.top = event.clientY + 16 + "px";
    }
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; hovered = -1; later(); });
  canvas.addEventListener("keydown", (event) => {
    const act = { ArrowLeft: () => show(view[0] - span() / 5, span()),
      ArrowRight: () => show(view[0] + span() / 5, span()),
      "+": () => zoom(0.7), "-": () => zoom(1 / 0.7), 0: everything }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  const jump = (event) => {
    if (event.type === "pointermove" && !event.buttons) return;
    const box = strip.getBoundingClientRect();
    const centre = (event.clientX - box.left - LEFT) / (box.width - LEFT) * (all[1] - all[0]);
    show(centre - span() / 2, span());
  };
  strip.addEventListener("pointerdown", jump);
  strip.addEventListener("pointermove", jump);
  document.getElementById("closer").onclick = () => zoom(0.6);
  document.getElementById("farther").onclick = () => zoom(1 / 0.6);
  document.getElementById("all").onclick = everything;
  window.addEventListener("resize", later);
  // For tests: what is in view.
  canvas.zos = () => ({ view: [...view], hovered });
  draw();
})();
