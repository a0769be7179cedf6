// The list of questions. Only the rows in sight exist: thousands scroll as easily as ten.
"use strict";

(function () {
  const { el, icon, outside, picture, number, plural } = svrlViewer;
  const SPARE_ROWS = 4; // above and below what is seen
  const WIDE_CHIPS = 3; // with more models a chip is its sign alone

  svrlViewer.List = class {
    /** `scroller` holds the rows; `addressOf(task)` gives a row's link. */
    constructor(index, scroller, addressOf) {
      this.index = index;
      this.scroller = scroller;
      this.addressOf = addressOf;
      this.tasks = [];
      this.episodes = new Map();
      this.current = null;
      this.rows = el("ol", { class: "rows" });
      scroller.replaceChildren(this.rows);
      scroller.addEventListener("scroll", () => this.draw(), { passive: true });
      new ResizeObserver(() => this.draw(true)).observe(scroller);
    }

    show({ tasks, episodes }) {
      this.tasks = tasks;
      this.episodes = episodes;
      this.rows.style.height = `${tasks.length * this.rowHeight()}px`;
      this.draw(true);
    }

    /** Marks the question that is open and brings it into sight. */
    mark(task) {
      this.current = task;
      const place = this.tasks.indexOf(task);
      if (place >= 0) {
        const [top, height] = [place * this.rowHeight(), this.rowHeight()];
        const { scrollTop, clientHeight } = this.scroller;
        if (top < scrollTop) this.scroller.scrollTop = top;
        else if (top + height > scrollTop + clientHeight) this.scroller.scrollTop = top + height - clientHeight;
      }
      this.draw(true);
    }

    /** The question `by` places behind the current one; the first if there is none. */
    neighbour(by) {
      const place = this.tasks.indexOf(this.current);
      if (place < 0) return this.tasks[0];
      return this.tasks[Math.min(Math.max(place + by, 0), this.tasks.length - 1)];
    }

    rowHeight() {
      return parseFloat(getComputedStyle(this.scroller).getPropertyValue("--row-height")) || 84;
    }

    draw(anew = false) {
      const height = this.rowHeight();
      const first = Math.max(0, Math.floor(this.scroller.scrollTop / height) - SPARE_ROWS);
      const seen = Math.ceil(this.scroller.clientHeight / height) + 2 * SPARE_ROWS;
      const last = Math.min(this.tasks.length, first + seen);
      if (!anew && first === this.first && last === this.last) return;
      [this.first, this.last] = [first, last];
      const focused = document.activeElement?.closest?.(".row")?.dataset.task;
      const rows = [];
      for (let place = first; place < last; place++) rows.push(this.row(place, height));
      this.rows.replaceChildren(...rows);
      if (focused !== undefined) {
        this.rows.querySelector(`[data-task="${Number(focused)}"] a`)?.focus({ preventScroll: true });
      }
    }

    row(place, height) {
      const number_ = this.tasks[place];
      const task = this.index.tasks[number_];
      const isCurrent = number_ === this.current;
      const anchor = el("a", { "aria-current": isCurrent ? "true" : null },
        picture(task.picture, "small", ""),
        el("span", { class: "row-text" },
          el("span", { class: "row-question" }, task.question ? outside(task.question) : "(question not recorded)"),
          el("span", { class: "chips" }, this.chips(number_))));
      anchor.href = this.addressOf(task.id);
      const row = el("li", {
        class: "row", "data-task": String(number_),
        "aria-posinset": place + 1, "aria-setsize": this.tasks.length,
      }, anchor);
      row.style.top = `${place * height}px`;
      return row;
    }

    /** Result, tools and reward of each model that faced the question. */
    chips(task) {
      const byModel = new Map();
      for (const e of this.episodes.get(task)) {
        const model = this.index.episodes.model[e];
        if (!byModel.has(model)) byModel.set(model, []);
        byModel.get(model).push(e);
      }
      const models = [...byModel.keys()].sort((a, b) => a - b);
      return models.map((model) => this.chip(model, byModel.get(model), models.length > WIDE_CHIPS));
    }

    chip(model, episodes, isNarrow) {
      const columns = this.index.episodes;
      const judged = episodes.filter((e) => columns.right[e] >= 0);
      const right = judged.filter((e) => columns.right[e] === 1).length;
      const verdict = !judged.length ? "unknown" : right * 2 >= judged.length ? "right" : "wrong";
      const tools = episodes.reduce((bits, e) => bits | columns.tools[e], 0);
      const rewards = episodes.map((e) => columns.reward[e]).filter((r) => r !== null);
      const reward = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
      const share = judged.length > 1 ? `${right} of ${judged.length} right` : verdict;
      const spoken = [
        `model ${model + 1}: ${share}`,
        tools & 1 ? "image search" : "", tools & 2 ? "text search" : "", tools ? "" : "no search",
        reward === null ? "" : `reward ${number(reward)}`,
      ].filter(Boolean).join(", ");
      return el("span", { class: `chip ${verdict}${isNarrow ? " narrow" : ""}`, title: spoken },
        el("span", { class: "visually-hidden" }, `${spoken}. `),
        el("span", { class: "chip-body", "aria-hidden": "true" },
          el("b", {}, String(model + 1)), icon(verdict),
          judged.length > 1 && !isNarrow ? `${right}/${judged.length}` : null,
          !isNarrow && tools & 1 ? icon("image_search") : null,
          !isNarrow && tools & 2 ? icon("text_search") : null,
          !isNarrow && reward !== null ? el("span", { class: "figure" }, number(reward)) : null));
    }
  };

  svrlViewer.countText = (selection, index) =>
    selection.tasks.length === index.tasks.length
      ? plural(index.tasks.length, "question")
      : `${selection.tasks.length.toLocaleString("en")} of ${plural(index.tasks.length, "question")}`;
})();
