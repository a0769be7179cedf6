// One question: picture and text, and the episodes of the chosen models side by side, turn by turn.
"use strict";

(function () {
  const { el, outside, brief, passage, picture, grouped, plural } = svrlViewer;
  const QUESTION_CHARS = 2000;
  const MAX_COLUMNS = 6;
  const MAX_COMPARED = 2e6; // pairs of turns
  const MANY_STEPS = 60; // drawn at once; a button brings more

  /** Turns of several episodes as rows: turns of one kind share a row, in an order that all keep.
   *
   * `kinds` holds the actions of each column; a row holds the turn's number in each column, or null.
   * Columns are merged one by one along their longest common subsequence; where that would take a
   * while, turns of one number share a row.
   */
  function align(kinds) {
    let rows = [];
    kinds.forEach((column, c) => {
      const emptyRow = (j) => ({ kind: column[j], turns: kinds.map((_, k) => (k === c ? j : null)) });
      if (rows.length * column.length > MAX_COMPARED) {
        column.forEach((_, j) => (rows[j] ? (rows[j].turns[c] = j) : rows.push(emptyRow(j))));
        return;
      }
      const lengths = common(rows.map((row) => row.kind), column);
      const merged = [];
      let [i, j] = [0, 0];
      while (i < rows.length || j < column.length) {
        if (i < rows.length && j < column.length && rows[i].kind === column[j] && lengths[i][j] === lengths[i + 1][j + 1] + 1) {
          rows[i].turns[c] = j;
          merged.push(rows[i++]);
          j++;
        } else if (j >= column.length || (i < rows.length && lengths[i + 1][j] >= lengths[i][j + 1])) {
          merged.push(rows[i++]);
        } else {
          merged.push(emptyRow(j++));
        }
      }
      rows = merged;
    });
    return rows;
  }

  /** lengths[i][j]: of the longest common subsequence of a[i:] and b[j:]. */
  function common(a, b) {
    const lengths = Array.from({ length: a.length + 1 }, () => new Array(b.length + 1).fill(0));
    for (let i = a.length - 1; i >= 0; i--) {
      for (let j = b.length - 1; j >= 0; j--) {
        lengths[i][j] = a[i] === b[j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
      }
    }
    return lengths;
  }

  /** Models that have the question, the chosen ones, and which episode of each is looked at. */
  function choose(index, state, task) {
    const byModel = new Map();
    for (const e of index.byTask[task]) {
      if (!svrlViewer.isAtStep(index, e, state.step)) continue;
      const model = index.episodes.model[e];
      if (!byModel.has(model)) byModel.set(model, []);
      byModel.get(model).push(e);
    }
    const chosen = state.models.map((key) => index.modelOfKey.get(key)).filter((m) => m !== undefined);
    const isWide = window.matchMedia("(min-width: 900px)").matches;
    const present = [...byModel.keys()].sort((a, b) => a - b);
    const shown = chosen.length ? chosen : present.slice(0, isWide ? 2 : 1);
    const columns = shown.slice(0, MAX_COLUMNS).map((model) => {
      const episodes = byModel.get(model) || [];
      const wanted = state.picks[index.models[model].key];
      const at = episodes.find((e) => pickOf(index, e) === wanted);
      return { model, episodes, episode: at ?? latest(index, episodes) };
    });
    return { present, columns };
  }

  const pickOf = (index, e) => `${index.episodes.step[e]}.${index.episodes.sample[e]}`;

  /** First sample of the latest step; undefined where there is none. */
  function latest(index, episodes) {
    const { step, sample } = index.episodes;
    return [...episodes].sort((a, b) => step[b] - step[a] || sample[a] - sample[b])[0];
  }

  svrlViewer.Question = class {
    /** `go(patch)` changes the state; `move(by)` opens a neighbour. */
    constructor(index, article, go, move) {
      Object.assign(this, { index, article, go, move });
      this.rowCount = 0;
      this.limit = MANY_STEPS; // of the steps drawn
      this.turn = 0; // counts draws, so that a slow one does not overwrite a later one
    }

    async show(state) {
      const { index } = this;
      if (state.task !== this.state?.task) this.limit = MANY_STEPS;
      this.state = state;
      const wanted = JSON.stringify([state.task, state.models, state.picks, state.step, state.at, state.tokens, this.limit]);
      if (wanted === this.shown) return undefined; // only filters have changed
      this.shown = wanted;
      const turn = ++this.turn;
      this.rowCount = 0;
      const task = state.task === null ? undefined : index.taskOfId.get(state.task);
      if (state.task === null) return this.fill(this.welcome());
      if (task === undefined) {
        return this.fill(el("p", { class: "hint" }, "This page holds no question called ", brief(state.task, 200), "."));
      }
      const { present, columns } = choose(index, state, task);
      let found;
      let tokens = [];
      try {
        found = await Promise.all(columns.map((c) => (c.episode === undefined ? null : index.episode(c.episode))));
        if (state.tokens && index.has_tokens) {
          tokens = await Promise.all(columns.map((c) => (c.episode === undefined ? null : index.tokens(c.episode))));
        }
      } catch (error) {
        if (turn !== this.turn) return undefined;
        this.shown = null; // the next change tries again
        return this.fill(el("p", { class: "failed", role: "alert" }, error.message));
      }
      if (turn !== this.turn) return undefined;
      columns.forEach((column, i) => Object.assign(column, { found: found[i], tokens: tokens[i] }));
      const full = found.find((one) => one)?.task ?? { ...index.tasks[task], golds: [], evidence: [] };
      this.fill(this.header(full, index.tasks[task]), this.models(present, columns), this.stepper(columns), this.grid(columns, full));
      if (this.shownTask !== state.task) this.article.scrollTop = 0;
      this.shownTask = state.task;
      this.article.querySelector(".now")?.scrollIntoView({ block: "nearest" });
      return undefined;
    }

    /** Replaces what is shown; the keyboard's place stays where its control still is. */
    fill(...parts) {
      const focus = this.article.contains(document.activeElement) ? document.activeElement.id : "";
      const scroll = this.article.querySelector(".columns")?.scrollLeft ?? 0;
      this.article.replaceChildren(...parts.filter(Boolean));
      const columns = this.article.querySelector(".columns");
      if (columns) columns.scrollLeft = scroll;
      if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
    }

    welcome() {
      const { index } = this;
      return el("div", { class: "welcome" },
        el("h2", {}, "Pick a question"),
        el("p", {}, `${plural(index.tasks.length, "question")}, ${plural(index.count, "episode")}, ${plural(index.models.length, "model")}. `,
          "Press ", el("kbd", {}, "j"), " for the first one, ", el("kbd", {}, "?"), " for every key."),
        index.problems.length ? el("div", { class: "problems" }, el("h3", {}, "To be known"),
          el("ul", {}, index.problems.map((p) => el("li", {}, passage(p, 300))))) : null);
    }

    header(task, known) {
      const step = (by, label, key) => el("button", { type: "button", class: "plain", id: `go${by}`, click: () => this.move(by) }, label, " ", el("kbd", {}, key));
      const image = task.picture ?? known.picture;
      return el("header", { class: "question-head" },
        el("nav", { class: "question-nav", "aria-label": "Questions" },
          el("button", { type: "button", class: "plain back", id: "back", click: () => this.go({ task: null, at: null }) }, "All questions"),
          step(-1, "Previous", "k"), step(1, "Next", "j")),
        el("div", { class: "question-body" },
          image ? this.image(image) : null,
          el("div", {},
            el("h2", {}, task.question ? passage(task.question, QUESTION_CHARS) : "(question not recorded)"),
            el("p", { class: "facts" }, [task.source, task.category, task.id].filter(Boolean).map((t) => el("span", { class: "fact" }, brief(t, 200))))))); 
    }

    image(reference) {
      if (reference.problem) return picture(reference, "large", "");
      const button = el("button", {
        type: "button", class: "enlarge", id: "enlarge", "aria-pressed": "false", title: "Larger or smaller",
        click: () => {
          const isLarge = button.classList.toggle("large");
          button.parentElement.classList.toggle("picture-large", isLarge);
          button.setAttribute("aria-pressed", String(isLarge));
        },
      }, picture(reference, "large", "The question's picture"));
      return button;
    }

    /** One button a model: press it to see it alone, the plus beside it to put it beside the others. */
    models(present, columns) {
      const { index, state } = this;
      const shown = columns.map((c) => c.model);
      const offered = index.models.map((_, i) => i).filter((i) => present.includes(i) || shown.includes(i));
      const absent = index.models.length - offered.length;
      return el("div", { class: "models", role: "group", "aria-label": "Models" }, offered.map((i) => {
        const isShown = shown.includes(i);
        const isAbsent = !present.includes(i);
        const beside = isShown ? shown.filter((m) => m !== i) : [...shown, i].sort((a, b) => a - b);
        return el("span", { class: `model${isShown ? " on" : ""}${isAbsent ? " absent" : ""}` },
          el("button", { type: "button", class: "model-name", id: `model${i}`, "aria-pressed": String(isShown), click: () => this.showModels([i]) },
            el("b", { class: "model-number" }, String(i + 1)), outside(index.label(i)), isAbsent ? " (no episode)" : ""),
          isShown && shown.length === 1 ? null
            : el("button", { type: "button", class: "model-beside", id: `beside${i}`, "aria-label": isShown ? `Take model ${i + 1} away` : `Put model ${i + 1} beside`, click: () => this.showModels(beside) }, isShown ? "−" : "+"));
      }), absent ? el("span", { class: "hint" }, `${plural(absent, "other model")} without an episode here`) : null);
    }

    showModels(numbers) {
      this.go({ models: numbers.map((m) => this.index.models[m].key) });
    }

    /** Adds or takes away a model, as the plus does. */
    toggleModel(number) {
      const task = this.index.taskOfId.get(this.state.task);
      if (task === undefined || !this.index.models[number]) return;
      const shown = choose(this.index, this.state, task).columns.map((c) => c.model);
      const rest = shown.filter((m) => m !== number);
      this.showModels(rest.length < shown.length ? (rest.length ? rest : shown) : [...shown, number].sort((a, b) => a - b));
    }

    stepper(columns) {
      const { state } = this;
      const kinds = columns.map((c) => (c.found ? c.found.view.turns.map((t) => t.action || "none") : []));
      this.rows = align(kinds);
      this.rowCount = this.rows.length + 1; // the outcome is the last step
      const at = this.at();
      const isTokens = state.tokens !== "";
      return el("div", { class: "stepper", role: "group", "aria-label": "Steps" },
        el("button", { type: "button", class: "plain", id: "step-back", disabled: at === 1, click: () => this.step(-1) }, "Previous step ", el("kbd", {}, "←")),
        el("button", { type: "button", class: "plain", id: "step-on", disabled: at === this.rowCount, click: () => this.step(1) }, "Next step ", el("kbd", {}, "→")),
        el("span", { class: "step-at", role: "status" }, at === null ? plural(this.rowCount, "step") : `step ${at} of ${this.rowCount}`),
        at === null ? null : el("button", { type: "button", class: "plain", id: "step-all", click: () => this.go({ at: null }) }, "All steps ", el("kbd", {}, "s")),
        this.index.has_tokens ? el("button", { type: "button", class: "plain", id: "tokens", "aria-pressed": String(isTokens), click: () => this.go({ tokens: isTokens ? "" : "mask" }) }, "Tokens ", el("kbd", {}, "t")) : null);
    }

    /** The step stepped to, from 1; null when all are shown. */
    at() {
      return this.state.at === null ? null : Math.min(Math.max(this.state.at, 1), this.rowCount);
    }

    step(by) {
      if (!this.rowCount) return;
      const at = this.at();
      this.go({ at: at === null ? 1 : Math.min(Math.max(at + by, 1), this.rowCount) });
    }

    grid(columns, task) {
      const at = this.at();
      const grid = el("div", { class: "columns", tabindex: "0", role: "region", "aria-label": "Episodes side by side" });
      grid.style.setProperty("--columns", columns.length);
      const cell = (column, row, className, ...children) => {
        const name = `Model ${column.model + 1}`;
        const node = el("div", { class: `cell ${className}`, role: "group", "aria-label": name }, ...children);
        node.style.gridColumn = String(columns.indexOf(column) + 1);
        node.style.gridRow = String(row);
        return node;
      };
      const when = (row) => (at === null ? "" : row === at ? "now" : row > at ? "later" : "");
      for (const column of columns) grid.append(cell(column, 1, "cell-head", this.columnHead(column)));
      const first = at === null ? 0 : Math.max(0, at - this.limit);
      const shown = this.rows.slice(first, first + this.limit);
      shown.forEach((row, r) => columns.forEach((column, c) => {
        if (!column.found) return;
        const turn = row.turns[c];
        const isEmpty = turn === null || turn === undefined;
        grid.append(cell(column, r + 2, `${when(first + r + 1)}${isEmpty ? " empty" : ""}`,
          isEmpty ? el("p", { class: "hint" }, "no such step") : svrlViewer.episode.turn(column.found.view, turn)));
      }));
      if (shown.length < this.rows.length) grid.append(this.more(first, shown.length));
      for (const column of columns) {
        const row = shown.length + 3;
        if (column.found) grid.append(cell(column, row, when(this.rowCount), svrlViewer.episode.outcome(column.found.view, task)));
        if (column.found && this.state.tokens) {
          grid.append(cell(column, row + 1, "", svrlViewer.tokenPanel(column.tokens, this.state.tokens, (tokens) => this.go({ tokens }), `model ${column.model + 1}`)));
        }
      }
      return grid;
    }

    /** Which of many steps are drawn, and a button for more. */
    more(first, count) {
      const button = el("button", { type: "button", class: "plain", id: "more-steps", click: () => {
        this.limit += MANY_STEPS;
        this.go({});
      } }, "Show more");
      const node = el("div", { class: "more-steps" },
        el("span", { class: "hint" }, `Steps ${grouped(first + 1)} to ${grouped(first + count)} of ${grouped(this.rows.length)} are drawn.`), button);
      node.style.gridRow = String(count + 2);
      return node;
    }

    columnHead(column) {
      const { index } = this;
      const name = el("p", { class: "column-name" }, el("b", { class: "model-number" }, String(column.model + 1)), outside(index.label(column.model)));
      if (!column.found) return [name, el("p", { class: "hint" }, "No episode on this question", this.state.step === null ? "." : " at this step.")];
      return [name, column.episodes.length > 1 ? this.picker(column) : null, svrlViewer.episode.head(column.found.view),
        index.models[column.model].is_trace ? el("p", { class: "hint" }, "Imported trace: tokens are counted by the viewer's tokenizer.") : null];
    }

    /** Which of several episodes of a model: its step and sample. */
    picker(column) {
      const { index } = this;
      const key = index.models[column.model].key;
      const select = el("select", { id: `pick${column.model}`, "aria-label": `Episode of model ${column.model + 1}`, change: () => this.go({ picks: { ...this.state.picks, [key]: select.value } }) },
        column.episodes.map((e) => {
          const { step, sample, right, reward } = index.episodes;
          const words = [step[e] === -1 ? "" : `step ${step[e]}`, `sample ${sample[e] + 1}`, right[e] < 0 ? "" : right[e] ? "right" : "wrong", reward[e] === null ? "" : reward[e].toFixed(2)];
          return el("option", { value: pickOf(index, e) }, words.filter(Boolean).join(" · "));
        }));
      select.value = pickOf(index, column.episode);
      return select;
    }
  };

  svrlViewer.align = align;
})();
