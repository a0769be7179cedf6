// The search field and the filters, a form whose fields are parts of the state.
"use strict";

(function () {
  const { el } = svrlViewer;
  const SEARCHED = [["", "any"], ["yes", "searched"], ["no", "did not search"], ["image", "image search"], ["text", "text search"]];
  const AGREE = [["", "any"], ["all", "all agree"], ["some", "some disagree"], ["none", "none agree"], ["unlabelled", "no labels"]];
  const FREE = [["", "any"], ["yes", "search_free"], ["no", "needs search"]];
  const FLIPS = [["", "any"], ["1", "models differ"]];
  const SORTS = [
    ["", "as recorded"], ["reward-low", "lowest reward"], ["reward-high", "highest reward"],
    ["right", "fewest right"], ["calls", "most searches"], ["agreement", "lowest agreement"],
    ["question", "question, A to Z"],
  ];

  svrlViewer.Filters = class {
    /** `change(patch)` is called with the parts of the state that the user sets. */
    constructor(index, form, change) {
      this.index = index;
      this.change = change;
      this.fields = new Map(); // name -> <select>
      this.search = el("input", {
        type: "search", id: "search", placeholder: "Search questions and answers", "aria-label": "Search questions and answers",
        autocomplete: "off", spellcheck: "false", input: () => change({ q: this.search.value }),
      });
      const ends = [["", "any"], ...index.ends.map((end) => [end, end])];
      const models = [["", "any model"], ...index.models.map((m, i) => [m.key, `${i + 1} ${index.label(i)}`])];
      const right = index.models.map((model, i) =>
        this.field(`right.${model.key}`, `${i + 1} ${index.label(i)}`, [["", "any"], ["right", "right"], ["wrong", "wrong"]],
          (value) => change({ right: { ...this.state.right, [model.key]: value } })));
      this.clear = el("button", { type: "button", class: "plain", click: () => change(NOTHING) }, "Clear");
      this.details = el("details", { class: "more-filters" },
        el("summary", {}, "Filters"),
        el("fieldset", {}, el("legend", {}, "Answer of"), right),
        el("fieldset", {}, el("legend", {}, "Episode"),
          this.field("model", "of", models),
          this.field("searched", "searched", SEARCHED),
          this.field("end", "end reason", ends),
          this.field("agree", "mask agreement", AGREE)),
        el("fieldset", {}, el("legend", {}, "Question"),
          this.field("free", "label", FREE), this.field("flips", "flips", FLIPS)));
      form.replaceChildren(this.search, el("div", { class: "form-line" }, this.field("sort", "Sort", SORTS), this.clear), this.details);
      form.addEventListener("submit", (event) => event.preventDefault());
    }

    field(name, label, options, take = (value) => this.change({ [name]: value })) {
      const select = el("select", { change: () => take(select.value) },
        options.map(([value, text]) => el("option", { value }, text)));
      this.fields.set(name, select);
      return el("label", { class: "field" }, el("span", {}, label), select);
    }

    /** Sets the fields to the state. */
    show(state) {
      this.state = state;
      if (document.activeElement !== this.search) this.search.value = state.q;
      let active = 0;
      for (const [name, select] of this.fields) {
        const value = name.startsWith("right.") ? state.right[name.slice(6)] || "" : state[name];
        select.value = value;
        if (select.selectedIndex < 0) select.value = "";
        const isOn = name !== "sort" && select.value !== "";
        select.classList.toggle("on", isOn);
        active += isOn;
      }
      this.details.firstElementChild.textContent = active ? `Filters (${active})` : "Filters";
      this.clear.hidden = !active && !state.q && state.step === null;
    }
  };

  const NOTHING = { q: "", right: {}, model: "", searched: "", end: "", agree: "", free: "", flips: "", step: null };
})();
