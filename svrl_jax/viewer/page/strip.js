// The strip of figures: each model over the filtered questions, and the step of training.
"use strict";

(function () {
  const { el, outside, percent, number, plural, grouped } = svrlViewer;
  const SVG = "http://www.w3.org/2000/svg";
  const [WIDTH, HEIGHT] = [220, 36];

  svrlViewer.Strip = class {
    /** `setStep(step or null)` is called when the slider moves. */
    constructor(index, section, setStep) {
      this.index = index;
      this.setStep = setStep;
      this.body = el("tbody");
      this.rows = index.models.map((_, model) => this.row(model));
      const head = ["Model", "Episodes", "Acc", "SR", "Agreement", "Reward"];
      const table = el("table", { class: "figures" },
        el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))), this.body);
      this.summary = el("summary", {}, "Figures");
      const details = el("details", { class: "strip-body", open: true }, this.summary,
        el("div", { class: "strip-parts" },
          el("div", { class: "table-scroll", tabindex: "0", role: "region", "aria-label": "Figures of each model" }, table),
          this.slider()));
      if (window.matchMedia("(max-width: 899px)").matches) details.open = false;
      section.replaceChildren(details);
    }

    slider() {
      const steps = this.index.steps;
      if (steps.length < 2) return null;
      this.range = el("input", {
        type: "range", min: 0, max: steps.length, value: 0, step: 1, id: "step",
        "aria-label": "Step of training",
        input: () => this.setStep(Number(this.range.value) ? steps[this.range.value - 1] : null),
      });
      this.output = el("output", { for: "step" });
      this.curve = document.createElementNS(SVG, "svg");
      this.curve.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
      this.curve.setAttribute("class", "curve");
      this.curve.setAttribute("role", "img");
      return el("div", { class: "slider" },
        el("div", { class: "slider-head" }, el("span", {}, "Training step"), this.output), this.curve, this.range);
    }

    /** Draws the figures of a selection. */
    show(selection, state) {
      const { index } = this;
      const found = svrlViewer.figures(index, selection);
      found.forEach((figures, model) => this.rows[model](figures));
      const means = found.map((f, i) => `${i + 1}: ${percent(f.acc)}`).slice(0, 4).join("  ");
      this.summary.textContent = `Figures of ${plural(selection.tasks.length, "question")}`;
      this.summary.append(el("span", { class: "summary-acc" }, `Acc ${means}`));
      if (!this.range) return;
      const place = index.steps.indexOf(state.step) + 1;
      this.range.value = place;
      const text = place ? String(state.step) : `all ${index.steps.length}`;
      this.output.textContent = text;
      this.range.setAttribute("aria-valuetext", place ? `step ${text}` : "all steps");
      this.drawCurve(state.step);
    }

    /** Adds the row of a model; returns what sets its figures. */
    row(model) {
      const bars = ["acc", "sr", "agreement"].map((name) => {
        const [figure, filled] = [el("span", { class: "figure" }), el("span", { class: "bar-filled" })];
        return { name, figure, filled, cell: el("td", {}, figure, el("span", { class: "bar", "aria-hidden": "true" }, filled)) };
      });
      const [episodes, reward] = [el("td", { class: "figure" }), el("td", { class: "figure" })];
      const row = el("tr", {},
        el("th", { scope: "row" }, el("b", { class: "model-number" }, String(model + 1)), outside(this.index.label(model))),
        episodes, bars.map((bar) => bar.cell), reward);
      this.body.append(row);
      return (figures) => {
        row.classList.toggle("empty", !figures.n);
        episodes.textContent = grouped(figures.n);
        for (const { name, figure, filled } of bars) {
          figure.textContent = percent(figures[name]);
          filled.style.width = `${100 * (figures[name] ?? 0)}%`;
        }
        reward.textContent = number(figures.reward);
      };
    }

    /** Mean reward of every step, or Acc where nothing was scored; all training models together. */
    drawCurve(current) {
      const { index } = this;
      if (!this.points) {
        const columns = index.episodes;
        const hasReward = columns.reward.some((r, e) => r !== null && columns.step[e] !== -1);
        const sums = new Map(index.steps.map((step) => [step, [0, 0]]));
        for (let e = 0; e < index.count; e++) {
          const sum = sums.get(columns.step[e]);
          const value = hasReward ? columns.reward[e] : columns.right[e] < 0 ? null : columns.right[e];
          if (!sum || value === null) continue;
          sum[0] += value;
          sum[1] += 1;
        }
        this.points = index.steps.map((step) => (sums.get(step)[1] ? sums.get(step)[0] / sums.get(step)[1] : null));
        this.curveName = hasReward ? "Mean reward" : "Acc";
      }
      const known = this.points.filter((v) => v !== null);
      const [low, high] = [Math.min(...known), Math.max(...known)];
      const x = (i) => 4 + (i / Math.max(1, index.steps.length - 1)) * (WIDTH - 40);
      const y = (value) => HEIGHT - 6 - (high > low ? (value - low) / (high - low) : 0.5) * (HEIGHT - 12);
      const line = this.points.map((v, i) => (v === null ? "" : `${x(i).toFixed(1)},${y(v).toFixed(1)}`)).filter(Boolean);
      const path = document.createElementNS(SVG, "polyline");
      path.setAttribute("points", line.join(" "));
      const parts = [path];
      const at = index.steps.indexOf(current);
      if (at >= 0 && this.points[at] !== null) {
        const dot = document.createElementNS(SVG, "circle");
        for (const [name, value] of [["cx", x(at)], ["cy", y(this.points[at])], ["r", 3.5]]) dot.setAttribute(name, value);
        parts.push(dot);
      }
      for (const value of high > low ? [low, high] : [high]) {
        const text = document.createElementNS(SVG, "text");
        text.setAttribute("x", WIDTH - 30);
        text.setAttribute("y", y(value) + 3.5);
        text.textContent = number(value);
        if (known.length) parts.push(text);
      }
      const range = known.length ? `from ${number(known[0])} to ${number(known[known.length - 1])}` : "unknown";
      this.curve.setAttribute("aria-label", `${this.curveName} over the steps, ${range}`);
      this.curve.replaceChildren(...parts);
    }
  };
})();
