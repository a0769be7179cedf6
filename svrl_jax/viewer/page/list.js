// The list of questions. Only the rows in sight exist: thousands scroll as easily as ten.
"use strict";

(function () {
  const { el, icon, outside, picture, number, grouped, plural } = svrlViewer;
  const SPARE_ROWS = 8; // above and below what is seen
  const KEPT_ROWS = 400;
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
      this.kept = new Map(); // question -> {row, episodes}, drawn before
      this.rows = el("ol", { class: "rows" });
      scroller.replaceChildren(this.rows);
      // Sizes are read where they change, never in between: reading them costs a layout.
      this.rowHeight = parseFloat(getComputedStyle(scroller).getPropertyValue("--row-height"));
      this.height = scroller.clientHeight;
      this.top = 0;
      scroller.addEventListener("scroll", () => {
        this.top = scroller.scrollTop;
        this.draw();
      }, { passive: true });
      new ResizeObserver(() => {
        this.height = scroller.clientHeight;
        this.draw();
      }).observe(scroller);
    }

    /** Shows other questions, from their top or where `current` is. */
    show({ tasks, episodes }, current) {
      const isOther = tasks.length !== this.tasks.length || tasks.some((task, i) => task !== this.tasks[i]);
      this.tasks = tasks;
      this.episodes = episodes;
      this.rows.style.height = `${tasks.length * this.rowHeight}px`;
      if (isOther) this.scrollTo(0);
      this.mark(current);
    }

    /** Marks the question that is open and brings it into sight. */
    mark(current) {
      this.current = current;
      const place = this.tasks.indexOf(current);
      if (place >= 0) {
        const top = place * this.rowHeight;
        if (top < this.top) this.scrollTo(top);
        else if (top + this.rowHeight > this.top + this.height) this.scrollTo(top + this.rowHeight - this.height);
      }
      this.draw(true);
    }

    scrollTo(top) {
      if (top === this.top) return;
      this.top = top;
      this.scroller.scrollTop = top;
    }

    /** The question `by` places behind the current one; the first if there is none. */
    neighbour(by) {
      const place = this.tasks.indexOf(this.current);
      if (place < 0) return this.tasks[0];
      return this.tasks[Math.min(Math.max(place + by, 0), this.tasks.length - 1)];
    }

    draw(anew = false) {
      const first = Math.max(0, Math.floor(this.top / this.rowHeight) - SPARE_ROWS);
      const last = Math.min(this.tasks.length, Math.ceil((this.top + this.height) / this.rowHeight) + SPARE_ROWS);
      if (!anew && first === this.first && last === this.last) return;
      [this.first, this.last] = [first, last];
      const focused = document.activeElement?.closest?.(".row");
      const rows = [];
      for (let place = first; place < last; place++) rows.push(this.row(place));
      this.rows.replaceChildren(...rows);
      if (focused?.isConnected) focused.firstElementChild.focus({ preventScroll: true });
    }

    /** A row at its place; one that was drawn before of the same episodes is used again. */
    row(place) {
      const task = this.tasks[place];
      const episodes = this.episodes.get(task);
      let kept = this.kept.get(task);
      if (kept?.episodes !== episodes) {
        kept = { episodes, row: this.newRow(task) };
        this.kept.delete(task);
        this.kept.set(task, kept);
        if (this.kept.size > KEPT_ROWS) this.kept.delete(this.kept.keys().next().value);
      }
      const anchor = kept.row.firstElementChild;
      anchor.href = this.addressOf(this.index.tasks[task].id);
      if (task === this.current) anchor.setAttribute("aria-current", "true");
      else anchor.removeAttribute("aria-current");
      kept.row.style.top = `${place * this.rowHeight}px`;
      kept.row.ariaPosInSet = place + 1;
      kept.row.ariaSetSize = this.tasks.length;
      return kept.row;
    }

    newRow(number_) {
      const task = this.index.tasks[number_];
      const anchor = el("a", {},
        picture(task.picture, "small", ""),
        el("span", { class: "row-text" },
          el("span", { class: "row-question" }, task.question ? outside(task.question) : "(question not recorded)"),
          this.chips(number_)));
      return el("li", { class: "row", "data-task": String(number_) }, anchor);
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
      const isNarrow = models.length > WIDE_CHIPS;
      return el("span", { class: isNarrow ? "chips narrow" : "chips" },
        models.map((model) => this.chip(model, byModel.get(model), isNarrow)));
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
      return el("span", { class: `chip ${verdict}`, title: spoken },
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
      : `${grouped(selection.tasks.length)} of ${plural(index.tasks.length, "question")}`;
})();
