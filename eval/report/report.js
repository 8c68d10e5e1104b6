// Draws the report from the JSON in #data. No number is computed here that a reader could cite.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  const contents = document.getElementById("contents");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  // ---- elements, numbers, colours ----
  const h = (tag, attributes = {}, ...children) => {
    const e = document.createElement(tag);
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    e.append(...children);
    return e;
  };
  const known = (x) => x !== null && x !== undefined;
  const fixed = (x, digits) => (known(x) ? x.toFixed(digits) : "–");
  const percent = (x) => (known(x) ? (100 * x).toFixed(2) : "–");
  const short = (x) => {
    if (!known(x)) return "–";
    const a = Math.abs(x);
    for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (a >= size) return `${+(x / size).toPrecision(3)}${unit}`;
    return a !== 0 && a < 1e-2 ? x.toExponential(1) : `${+x.toPrecision(4)}`;
  };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // One colour per run, on every chart; an evaluated model has its run's.
  const runNames = data.runs.map((r) => r.name);
  const runOf = (model) => data.models.find((m) => m.name === model)?.run ?? model;
  const keys = [...new Set([...runNames, ...data.models.map((m) => runOf(m.name))])];
  const light = ["#3b6fd4", "#d9662b", "#2f9e77", "#b0479c", "#8a7a1f", "#3aa0c4", "#c23b4b", "#6d6a8f"];
  const darker = ["#7ea6ff", "#f0935c", "#5fcfa4", "#dd86cc", "#c9b850", "#6ccbe8", "#f07a86", "#a9a5d0"];
  const colour = (name) => {
    const i = Math.max(0, keys.indexOf(runOf(name)));
    const list = dark.matches ? darker : light;
    return list[i % list.length];
  };
  // Models of one run (several checkpoints) share its colour and differ in line style.
  const style = (model) => {
    const same = data.models.filter((m) => runOf(m.name) === runOf(model)).map((m) => m.name);
    return ["solid", "dashed", "dotted"][Math.max(0, same.indexOf(model)) % 3];
  };

  // ---- sections, tables, charts ----
  const section = (id, title, ...intro) => {
    contents.append(h("a", { href: "#" + id }, title));
    const s = h("section", { id }, h("h2", {}, title), ...intro.map((t) => h("p", { class: "quiet" }, t)));
    page.append(s);
    return s;
  };
  const table = (parent, head, rows, words = [0]) => {
    const cell = (tag, i, c) => h(tag, words.includes(i) ? { class: "words" } : {}, c);
    const body = rows.map((r) => {
      const total = r.total === true;
      return h("tr", total ? { class: "total" } : {}, ...(total ? r.cells : r).map((c, i) => cell("td", i, c)));
    });
    parent.append(h("div", { class: "table" }, h("table", {},
      h("thead", {}, h("tr", {}, ...head.map((c, i) => cell("th", i, c)))), h("tbody", {}, ...body))));
  };
  const named = (name) => {
    const dot = h("span", { class: "dot", "data-colour": name });
    dot.style.background = colour(name);
    return h("span", {}, dot, name);
  };

  const charts = [];
  const base = () => ({
    animation: false,
    aria: { enabled: true },
    textStyle: { color: css("--text"), fontFamily: "system-ui, sans-serif" },
    grid: { left: 4, right: 16, top: 16, bottom: 4, outerBoundsMode: "same", outerBoundsContain: "all" },
    tooltip: { confine: true, backgroundColor: css("--back"), borderColor: css("--line"),
      textStyle: { color: css("--text"), fontSize: 12 } },
  });
  const axis = (name, more = {}) => ({
    name, nameLocation: "middle", nameGap: 8, nameTextStyle: { color: css("--quiet") },
    axisLabel: { color: css("--quiet"), hideOverlap: true },
    axisLine: { lineStyle: { color: css("--line") } },
    splitLine: { lineStyle: { color: css("--line"), opacity: 0.6 } }, ...more,
  });
  const chart = (parent, title, height, option, caption = "") => {
    const box = h("div", { class: "chart", role: "img", "aria-label": title });
    box.style.height = height + "px";
    const figure = h("figure", {}, h("h3", {}, title), box);
    if (caption) figure.append(h("figcaption", {}, caption));
    parent.append(figure);
    const c = { title, box, option, view: null };
    charts.push(c);
    return c;
  };
  const draw = (c) => {
    if (!c.view) {
      c.view = echarts.init(c.box, null, { renderer: "canvas" });
      new ResizeObserver(() => c.view.resize()).observe(c.box);
    }
    c.view.setOption({ ...base(), ...c.option() }, true);
  };

  // ---- overview ----
  const overview = () => {
    const s = h("section", { id: "overview" });
    page.append(s);
    for (const note of data.notes) s.append(h("p", { class: "note" }, note));
    const rows = keys.map((k) => {
      const run = data.runs.find((r) => r.name === k) ?? {};
      const sum = run.training?.summary ?? {};
      const models = data.models.filter((m) => runOf(m.name) === k);
      const mean = data.means.filter((m) => runOf(m.model) === k);
      const r = run.gates?.correlation;
      return [named(k), run.recipe?.init?.scheme ?? "–", models.length ? short(models[0].parameters) : "–",
        known(sum.steps) ? String(sum.steps) : "–", short(sum.tokens), sum.skipped > 0 ? short(sum.skipped) : "–",
        fixed(sum.loss, 4), fixed(sum.validation_loss, 4),
        short(run.speed?.tokens_per_gpu_per_second),
        mean.length === 1 ? percent(mean[0].accuracy) : "–", fixed(r?.A_log.all, 3), fixed(r?.dt_bias.all, 3)];
    });
    const head = ["run", "start", "parameters", "steps", "tokens", "skipped steps", "loss", "validation", "TGS",
      "needles, %", "r(A_log)", "r(dt_bias)"];
    const used = head.map((_, i) => rows.some((r) => r[i] !== "–"));
    const only = (cells) => cells.filter((_, i) => used[i]);
    table(s, only(head), rows.map(only), used[1] ? [0, 1] : [0]);
    s.append(h("p", { class: "quiet" },
      "loss: mean of the last twentieth of the records. needles: mean accuracy over all settings. " +
      "r: correlation over heads of a gate parameter at the start and after training. TGS: tokens per GPU per " +
      "second, the median of steps 21 to 120 of the process that trained last."));
  };

  // ---- training ----
  // The first steps fall from so high that the rest would be a flat line: the axis ends where the
  // curves are after a twentieth of the steps.
  const top = (runs) => {
    const most = Math.max(...runs.flatMap((r) => {
      const { step, loss } = r.training;
      return loss.filter((x, i) => known(x) && step[i] >= step[step.length - 1] / 20);
    }));
    if (!Number.isFinite(most)) return Infinity;
    const unit = 10 ** Math.floor(Math.log10(Math.abs(most) || 1)) / 10;
    return Math.ceil(most / unit) * unit;
  };
  const curve = (parent, title, key, height, y = {}) => {
    const runs = data.runs.filter((r) => r.training?.[key].some(known));
    if (!runs.length) return;
    const buckets = [...new Set(runs.map((r) => r.training.bucket))].filter((b) => b > 1);
    chart(parent, title, height, () => ({
      tooltip: { ...base().tooltip, trigger: "axis", valueFormatter: (v) => short(v) },
      dataZoom: [{ type: "inside", filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false }],
      xAxis: axis("step", { type: "value", min: 0, max: "dataMax",
        axisLabel: { color: css("--quiet"), hideOverlap: true, showMaxLabel: false } }),
      yAxis: axis("", { type: "value", scale: true, axisLabel: { color: css("--quiet"), formatter: short }, ...y }),
      series: runs.flatMap((r) => {
        const t = r.training;
        const value = (v) => (known(v) && (y.type !== "log" || v > 0) ? v : null);
        const line = { name: r.name, type: "line", showSymbol: t[key].filter(known).length === 1,
          color: colour(r.name), lineStyle: { width: 1.6 }, data: t.step.map((x, i) => [x, value(t[key][i])]) };
        if (key !== "loss" || !t.validation.length) return [line];
        return [line, { name: r.name + " validation", type: "line", symbolSize: 7, symbol: "diamond",
          color: colour(r.name), lineStyle: { type: "dashed", width: 1.2 }, data: t.validation }];
      }),
    }), [key === "loss" ? "The first twentieth of the steps may lie above the top; Ctrl and the wheel zoom." : "",
      buckets.length ? `Each point is the mean of ${buckets.join(" or ")} records.` : ""].join(" ").trim());
  };
  const training = () => {
    if (!data.runs.some((r) => r.training)) return;
    const s = section("training", "Training");
    key(s, data.runs.filter((r) => r.training).map((r) => r.name));
    const validation = data.runs.some((r) => r.training?.validation.length);
    curve(s, validation ? "Loss, nats per token (diamonds: validation)" : "Loss, nats per token", "loss", 360,
      { max: (v) => Math.min(v.max, top(data.runs.filter((r) => r.training))) });
    const grid = h("div", { class: "grid small" });
    s.append(grid);
    curve(grid, "Gradient norm", "norm", 200, { type: "log" });
    curve(grid, "Learning rate", "lr", 200);
    curve(grid, "Tokens per second", "tokens_per_second", 200, { min: 0 });
    const timed = data.runs.filter((r) => r.speed);
    if (!timed.length) return;
    table(s, ["tokens per GPU per second", "TGS", "ms a step", "steps", "sequences", "length", "activations", "device"],
      timed.map((r) => [named(r.name), String(Math.round(r.speed.tokens_per_gpu_per_second)), fixed(r.speed.median_step_ms, 2),
        (r.speed.steps ?? []).join("–"), String(r.speed.sequences ?? "–"), String(r.speed.length ?? "–"),
        r.speed.dtype ?? "–", r.speed.device ?? "–"]), [0, 7]);
  };
  const key = (parent, names) =>
    parent.append(h("ul", { class: "key" }, ...names.map((n) => h("li", {}, named(n)))));

  // ---- retrieval ----
  // The end of an axis of percents that has to hold `most`.
  const ceiling = (most) => Math.min(100, most > 50 ? Math.ceil(most / 10) * 10 : Math.max(5, Math.ceil(most / 5) * 5));
  const evaluated = [...new Set(data.scores.map((s) => s.model))];
  const tasks = [...new Set(data.scores.map((s) => s.task))];
  const lengths = [...new Set(data.scores.map((s) => s.length))].sort((a, b) => a - b);
  const score = (model, task, length) =>
    data.scores.find((s) => s.model === model && s.task === task && s.length === length);

  const whisker = (i, count, values) => ({
    type: "custom", silent: true, z: 5, tooltip: { show: false }, data: values, encode: { x: 0, y: [1, 2] },
    renderItem: (_, api) => {
      const place = api.barLayout({ count, barGap: "12%", barCategoryGap: "30%" })[i];
      const at = (y) => {
        const p = api.coord([api.value(0), y]);
        return [p[0] + place.offsetCenter, p[1]];
      };
      const low = at(api.value(1)), high = at(api.value(2));
      const tip = Math.min(4, place.width / 4), style = { stroke: css("--text"), lineWidth: 1, opacity: 0.75 };
      const line = (x1, y1, x2, y2) => ({ type: "line", shape: { x1, y1, x2, y2 }, style });
      return { type: "group", children: [line(low[0], low[1], high[0], high[1]),
        line(low[0] - tip, low[1], low[0] + tip, low[1]), line(high[0] - tip, high[1], high[0] + tip, high[1])] };
    },
  });
  const byLength = (parent, task) => chart(parent, task, 260, () => ({
    tooltip: { ...base().tooltip, trigger: "axis", axisPointer: { type: "shadow" }, formatter: (ps) =>
      `${ps[0].axisValue} tokens` + ps.filter((p) => p.seriesType === "bar").map((p) => {
        const s = score(p.seriesName, task, lengths[p.dataIndex]);
        return s ? `<br>${p.marker}${escape(p.seriesName)}: ${percent(s.accuracy)} % ` +
          `(${percent(s.low)} to ${percent(s.high)}; ${s.right} of ${s.count})` : "";
      }).join("") },
    xAxis: axis("length, tokens", { type: "category", data: lengths.map(String) }),
    yAxis: axis("", { type: "value", min: 0, max: ceiling(100 * Math.max(...data.scores.map((s) => s.high))),
      axisLabel: { color: css("--quiet"), formatter: "{value} %" } }),
    series: evaluated.flatMap((m, i) => {
      const rows = lengths.map((l) => score(m, task, l));
      return [{ name: m, type: "bar", barMinHeight: 2, barGap: "12%", barCategoryGap: "30%", itemStyle: { color: colour(m),
        opacity: style(m) === "solid" ? 1 : 0.6 }, data: rows.map((s) => (s ? 100 * s.accuracy : null)) },
      whisker(i, evaluated.length, rows.flatMap((s, x) => (s ? [[x, 100 * s.low, 100 * s.high]] : [])))];
    }),
  }));
  const escape = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

  const retrieval = () => {
    if (!data.scores.length) return;
    const s = section("retrieval", "Retrieval by length",
      "How often the asked value is contained in the greedy answer, with 95 % Wilson intervals.");
    key(s, evaluated);
    const grid = h("div", { class: "grid" });
    s.append(grid);
    for (const t of tasks) byLength(grid, t);
    const rows = [];
    for (const t of tasks)
      for (const l of lengths) {
        const row = evaluated.map((m) => score(m, t, l));
        if (row.every((x) => !x)) continue;
        rows.push([t, String(l), String(Math.max(...row.map((x) => x?.count ?? 0))), ...row.map((x) => x
          ? h("span", {}, percent(x.accuracy), h("span", { class: "quiet" }, ` ${fixed(100 * x.low, 1)}–${fixed(100 * x.high, 1)}`)) : "–")]);
      }
    const mean = (m) => data.means.find((x) => x.model === m);
    rows.push({ total: true, cells: ["mean", "", "", ...evaluated.map((m) => percent(mean(m)?.accuracy))] });
    table(s, ["task", "length", "samples", ...evaluated.map((m) => named(m))], rows);
  };

  const distance = () => {
    if (!data.distance.length) return;
    const s = section("distance", "Retrieval by distance",
      "Distance: tokens from the asked value to the question, as a share of the whole text. Left: close " +
      "to the question; right: far back. Accuracy of a bin: mean over its tasks; bands: 95 % intervals.");
    key(s, [...new Set(data.distance.map((d) => d.model))]);
    const grid = h("div", { class: "grid" });
    s.append(grid);
    const all = [...new Set(data.distance.flatMap((d) => d.lengths.map((l) => l.length)))].sort((a, b) => a - b);
    for (const length of all) {
      const rows = data.distance.flatMap((d) => d.lengths.filter((l) => l.length === length)
        .map((l) => ({ model: d.model, bins: l.bins, tasks: l.tasks })));
      const samples = rows[0].bins.reduce((n, b) => n + b.samples.reduce((a, x) => a + x, 0), 0);
      chart(grid, `${length} tokens`, 260, () => ({
        tooltip: { ...base().tooltip, trigger: "axis", formatter: (ps) => {
          const i = ps[0].dataIndex;
          return `distance ${fixed(rows[0].bins[i].center, 3)}` + rows.map((r) => {
            const b = r.bins[i];
            const n = b.samples.reduce((a, x) => a + x, 0);
            return `<br><span style="color:${colour(r.model)}">●</span> ${escape(r.model)}: ` +
              (known(b.accuracy) ? `${percent(b.accuracy)} % (${percent(b.low)} to ${percent(b.high)}; ${n} samples)` : "no samples");
          }).join("");
        } },
        xAxis: axis("distance", { type: "value", min: 0, max: 1 }),
        yAxis: axis("", { type: "value", min: 0,
          max: ceiling(100 * Math.max(...rows.flatMap((r) => r.bins.map((b) => b.high ?? 0)))),
          axisLabel: { color: css("--quiet"), formatter: "{value} %" } }),
        series: rows.flatMap((r) => {
          const points = (f) => r.bins.map((b) => [b.center, known(b.accuracy) ? 100 * f(b) : null]);
          const band = { type: "custom", silent: true, data: [0], color: colour(r.model), renderItem: (_, api) => {
            const inside = r.bins.filter((b) => known(b.accuracy));
            const up = inside.map((b) => api.coord([b.center, 100 * b.high]));
            const down = inside.map((b) => api.coord([b.center, 100 * b.low])).reverse();
            return { type: "polygon", shape: { points: [...up, ...down] }, style: { fill: colour(r.model), opacity: 0.13 } };
          }, clip: true, tooltip: { show: false } };
          return [{ name: r.model, type: "line", symbolSize: 5, color: colour(r.model),
            lineStyle: { width: 1.8, type: style(r.model) }, data: points((b) => b.accuracy) }, band];
        }),
      }), `${rows[0].tasks.join(", ")}; ${samples} samples.`);
    }
  };

  const perplexity = () => {
    if (!data.perplexity.length) return;
    const s = section("perplexity", "Perplexity");
    table(s, ["model", "tokens", "documents", "perplexity", "bits per byte", "loss per token"],
      data.perplexity.map((p) => [named(p.model), String(p.tokens), String(p.documents), fixed(p.perplexity, 4),
        fixed(p.bits_per_byte, 4), fixed(p.nll / p.tokens, 4)]));
  };

  const choices = () => {
    if (!data.choices.length) return;
    const s = section("choices", "Multiple choice");
    const cell = (a) => `${fixed(100 * a.accuracy, 1)} (${fixed(100 * a.low, 1)} - ${fixed(100 * a.high, 1)})`;
    table(s, ["model", "questions", "count", "acc, % (95% interval)", "acc_norm, %"],
      data.choices.map((c) => [named(c.model), c.task, String(c.count), cell(c.acc), cell(c.acc_norm)]));
  };

  // ---- decay gates ----
  const quantities = {
    timescale: { title: "timescale, tokens", log: true },
    sensitivity: { title: "mean sensitivity", log: false },
    A_log: { title: "A_log", log: false },
    dt_bias: { title: "dt_bias", log: false },
  };
  const gated = data.runs.filter((r) => r.gates);
  let shown = "timescale";
  const scale = (x) => (!known(x) || (quantities[shown].log && x <= 0) ? null : quantities[shown].log ? Math.log10(x) : x);
  const unscale = (x) => short(quantities[shown].log ? 10 ** x : x);

  const heat = (parent, title, gates) => {
    const layers = [...new Set(gates.map((g) => g.layer))], heads = [...new Set(gates.map((g) => g.head))].sort((a, b) => a - b);
    return chart(parent, title, 110 + Math.max(60, layers.length * 17), () => {
      const values = gated.flatMap((r) => [...(r.gates.initial ?? []), ...(r.gates.final ?? [])])
        .map((g) => scale(g[shown])).filter(known);
      let low = Math.min(...values), high = Math.max(...values);
      if (!values.length) [low, high] = [0, 1];
      else if (!(high > low)) [low, high] = [low - 0.5, low + 0.5];
      return {
        grid: { ...base().grid, bottom: 34 },
        tooltip: { ...base().tooltip, formatter: (p) => {
          const g = gates[p.dataIndex];
          return `layer ${g.layer}, head ${g.head}<br>` + Object.keys(quantities).map((q) => `${q}: ${short(g[q])}`).join("<br>");
        } },
        xAxis: axis("head", { type: "category", data: heads.map(String), splitArea: { show: false } }),
        yAxis: axis("layer", { type: "category", data: layers.map(String), inverse: true }),
        visualMap: { min: low, max: high, calculable: false, orient: "horizontal", left: "center", bottom: 0, itemWidth: 12,
          itemHeight: 140, formatter: unscale, text: [unscale(high), unscale(low)], textStyle: { color: css("--quiet") },
          inRange: { color: ["#3b1c5a", "#3f4c8a", "#2a788e", "#26a784", "#86d349", "#fde725"] } },
        series: [{ type: "heatmap", itemStyle: { borderColor: css("--card"), borderWidth: 1 },
          data: gates.map((g) => [heads.indexOf(g.head), layers.indexOf(g.layer), scale(g[shown]) ?? "-"]) }],
      };
    });
  };

  const movement = (parent, quantity, logarithmic) => {
    const runs = gated.filter((r) => r.gates.correlation);
    const at = (g) => (logarithmic ? (g[quantity] > 0 ? g[quantity] : null) : g[quantity]);
    chart(parent, logarithmic ? quantity + ", tokens" : quantity, 300, () => {
      const pairs = runs.map((r) => r.gates.initial.flatMap((a) => {
        const b = r.gates.final.find((g) => g.layer === a.layer && g.head === a.head);
        return b && known(at(a)) && known(at(b)) ? [[at(a), at(b), a.layer, a.head]] : [];
      }));
      const both = pairs.flat().flatMap((p) => [p[0], p[1]]);
      const range = { type: logarithmic ? "log" : "value", scale: true,
        axisLabel: { color: css("--quiet"), formatter: short, hideOverlap: true } };
      const ends = [Math.min(...both), Math.max(...both)];
      return {
        tooltip: { ...base().tooltip, trigger: "item", formatter: (p) =>
          `${escape(p.seriesName)}<br>layer ${p.value[2]}, head ${p.value[3]}<br>${short(p.value[0])} → ${short(p.value[1])}` },
        xAxis: axis("at the start", range), yAxis: axis("after training", range),
        series: [...runs.map((r, i) => ({ name: r.name, type: "scatter", symbolSize: 7, data: pairs[i],
          itemStyle: { color: colour(r.name), opacity: 0.75 } })),
        { type: "line", silent: true, showSymbol: false, data: both.length ? ends.map((e) => [e, e]) : [], tooltip: { show: false },
          lineStyle: { color: css("--quiet"), width: 1, type: "dashed" } }],
      };
    });
  };

  const gates = () => {
    if (!gated.length) return;
    const s = section("gates", "Decay gates",
      "Timescale: tokens after which a state has faded to 1/e, at the mean log decay on the calibration " +
      "sample. Sensitivity: mean slope of the gate's softplus there.");
    const choice = h("select", {}, ...Object.entries(quantities).map(([q, v]) => h("option", { value: q }, v.title)));
    s.append(h("p", {}, h("label", {}, "Show", choice)));
    const maps = [];
    for (const r of gated) {
      s.append(h("h3", {}, named(r.name)));
      const grid = h("div", { class: "grid" });
      s.append(grid);
      if (r.gates.initial) maps.push(heat(grid, "at the start", r.gates.initial));
      if (r.gates.final) maps.push(heat(grid, "after training", r.gates.final));
    }
    choice.addEventListener("change", () => {
      shown = choice.value;
      maps.forEach(draw);
    });
    const moved = gated.filter((r) => r.gates.correlation);
    if (!moved.length) return;
    const m = section("movement", "What training kept of the start",
      "One point a head; on the dashed line nothing has changed. r: Pearson's correlation over all heads.");
    key(m, moved.map((r) => r.name));
    const grid = h("div", { class: "grid small" });
    m.append(grid);
    movement(grid, "A_log", false);
    movement(grid, "dt_bias", false);
    movement(grid, "timescale", true);
    const columns = ["A_log", "dt_bias", "timescale", "sensitivity"];
    const head = columns.map((q) => `r(${q === "timescale" ? "log timescale" : q})`);
    table(m, ["run", ...head], moved.map((r) => [named(r.name), ...columns.map((q) => fixed(r.gates.correlation[q].all, 4))]));
    const layers = h("details", {}, h("summary", {}, "by layer"));
    for (const r of moved) {
      layers.append(h("h3", {}, named(r.name)));
      table(layers, ["layer", ...head], r.gates.correlation.A_log.by_layer.map(([l], i) =>
        [String(l), ...columns.map((q) => fixed(r.gates.correlation[q].by_layer[i][1], 4))]));
    }
    m.append(layers);
  };

  // ---- decays in use ----
  const moments = { initial: "at the start", final: "after training", measured: "measured" };
  const decays = () => {
    const runs = data.runs.filter((r) => r.decays);
    if (!runs.length) return;
    const s = section("decays", "Decays in use",
      "The share of its state that a model keeps from one token to the next, over all heads and channels of a " +
      "layer. Lines: medians; bars: quartiles.");
    key(s, runs.map((r) => r.name));
    const grid = h("div", { class: "grid" });
    s.append(grid);
    for (const moment of Object.keys(moments)) {
      const shown = runs.filter((r) => r.decays[moment]);
      if (!shown.length) continue;
      const rows = (r) => r.decays[moment].layers;
      chart(grid, moments[moment], 300, () => ({
        tooltip: { ...base().tooltip, trigger: "axis", formatter: (ps) => `layer ${ps[0].value[0]}` +
          ps.filter((p) => p.seriesType === "line").map((p) => {
            const x = rows(shown.find((r) => r.name === p.seriesName))[p.dataIndex];
            return `<br>${p.marker}${escape(p.seriesName)}: ${short(x.median)} ` +
              `(${short(x.lower_quartile)} to ${short(x.upper_quartile)})`;
          }).join("") },
        xAxis: axis("layer", { type: "value", min: 0, max: "dataMax", minInterval: 1 }),
        yAxis: axis("", { type: "value", min: (v) => Math.max(0, Math.floor(10 * v.min - 0.2) / 10), max: 1 }),
        series: shown.flatMap((r) => [
          { name: r.name, type: "line", symbolSize: 6, color: colour(r.name), lineStyle: { width: 1.8 },
            data: rows(r).map((x) => [x.layer, x.median]) },
          { type: "custom", silent: true, tooltip: { show: false }, encode: { x: 0, y: [1, 2] },
            data: rows(r).filter((x) => known(x.lower_quartile)).map((x) => [x.layer, x.lower_quartile, x.upper_quartile]),
            renderItem: (_, api) => {
              const low = api.coord([api.value(0), api.value(1)]), high = api.coord([api.value(0), api.value(2)]);
              return { type: "line", shape: { x1: low[0], y1: low[1], x2: high[0], y2: high[1] },
                style: { stroke: colour(r.name), lineWidth: 4, opacity: 0.35 } };
            } }]),
      }), `On ${[...new Set(shown.map((r) => r.decays[moment].tokens))].join(" or ")} tokens.`);
    }
    table(s, ["run", "", "median", "1st quartile", "3rd quartile", "mean", "deviation", "least", "most"],
      runs.flatMap((r) => Object.keys(moments).filter((m) => r.decays[m]).map((m) => {
        const a = r.decays[m].all;
        return [named(r.name), moments[m], ...["median", "lower_quartile", "upper_quartile", "mean", "deviation",
          "least", "most"].map((q) => short(a[q]))];
      })), [0, 1]);
  };

  // ---- where the numbers come from ----
  const flat = (value, path = "") => value !== null && typeof value === "object" && !Array.isArray(value)
    ? Object.entries(value).flatMap(([k, v]) => flat(v, path ? `${path}.${k}` : k))
    : [[path, Array.isArray(value) ? value.join(", ") : String(value)]];
  const sources = () => {
    const recipes = data.runs.filter((r) => r.recipe);
    if (!recipes.length && !data.models.length) return;
    const s = section("sources", "Where the numbers come from");
    if (recipes.length) {
      const lines = [...new Set(recipes.flatMap((r) => flat(r.recipe).map(([k]) => k)))];
      const values = recipes.map((r) => Object.fromEntries(flat(r.recipe)));
      const d = h("details", {}, h("summary", {}, "recipes"));
      table(d, ["field", ...recipes.map((r) => named(r.name))], lines.map((k) => [k, ...values.map((v) => v[k] ?? "–")]));
      s.append(d);
    }
    if (data.models.length) {
      const d = h("details", {}, h("summary", {}, "evaluated models"));
      table(d, ["model", "folder", "checkpoint", "parameters", "tokenizer"], data.models.map((m) =>
        [named(m.name), m.folder, m.checkpoint, String(m.parameters), `${m.tokenizer.kind} ${m.tokenizer.sha256.slice(0, 12)}`]), [0, 1, 2, 4]);
      s.append(d);
    }
    if (data.scores.length) {
      const d = h("details", {}, h("summary", {}, "sample files"));
      table(d, ["model", "file", "SHA-256", "fit", "seed", "prompt tokens", "longest allowed", "truncated"], data.scores.map((x) =>
        [named(x.model), x.data, x.data_sha256.slice(0, 12), x.fit, String(x.seed ?? "–"),
          `${x.prompt_tokens.min}–${x.prompt_tokens.max}`, String(x.max_length), String(x.truncated)]), [0, 1, 2, 3]);
      s.append(d);
    }
  };

  // What cannot be drawn says so and leaves the rest of the page alone.
  const guarded = (what, part) => {
    try {
      part();
    } catch (error) {
      page.append(h("p", { class: "note" }, `${what} could not be drawn: ${error.message}`));
      console.error(error);
    }
  };
  for (const part of [overview, training, retrieval, distance, perplexity, choices, gates, decays, sources])
    guarded(part.name, part);
  for (const c of charts) guarded(c.title, () => draw(c));
  dark.addEventListener("change", () => {
    charts.forEach(draw);
    document.querySelectorAll("[data-colour]").forEach((e) => (e.style.background = colour(e.dataset.colour)));
  });
})();
