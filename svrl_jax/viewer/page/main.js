// Puts the parts together: state from the address, keys, theme.
"use strict";

(function () {
  const { el, outside, plural, route } = svrlViewer;
  const byId = (id) => document.getElementById(id);
  const THEMES = ["system", "light", "dark"];
  const KEYS = [
    ["j / k", "next, previous question"], ["↓ / ↑", "the same, in the list"], ["1 to 9", "show that model alone"],
    ["Shift + 1 to 9", "put that model beside, or take it away"], ["→ / ←", "next, previous step in all columns"],
    ["s", "all steps, or one by one"], ["t", "tokens"], ["[ / ]", "previous, next step of training"], ["/", "search"],
    ["Escape", "back: from one step to all, then to the list"], ["?", "this list"],
  ];

  // Without the index there is nothing to show; its absence is told.
  const late = setTimeout(() => {
    byId("question").replaceChildren(el("p", { class: "failed", role: "alert" }, "data/index.js is missing beside this page, or still loading. Make the page anew."));
  }, 20000);

  svrlViewer.whenIndexed(function start(index) {
    clearTimeout(late);
    let state = route.parse(location.hash);
    let selection = null;
    let selected = "";
    let writing = 0; // number of the frame that the address waits for

    const list = new svrlViewer.List(index, byId("list"), (task) => route.format({ ...state, task, at: null }));
    const filters = new svrlViewer.Filters(index, byId("filters"), filter);
    const strip = new svrlViewer.Strip(index, byId("strip"), (step) => go({ step }, true));
    const question = new svrlViewer.Question(index, byId("question"), (patch) => go(patch, true), move);

    /** Changes the state and its address. Opening a question is a new place to come back to. */
    function go(patch, isSamePlace = false) {
      state = { ...state, ...patch };
      const address = route.format(state);
      if (isSamePlace) history.replaceState(null, "", address);
      else history.pushState(null, "", address);
      draw();
    }

    /** As `go`, but what passes is on the screen before the address, which takes its time. */
    function filter(patch) {
      state = { ...state, ...patch };
      draw();
      cancelAnimationFrame(writing);
      writing = requestAnimationFrame(() => setTimeout(() => history.replaceState(null, "", route.format(state))));
    }

    function move(by) {
      const task = list.neighbour(by);
      if (task !== undefined) go({ task: index.tasks[task].id, at: state.at === null ? null : 1 });
    }

    function draw() {
      const { q, right, model, searched, end, agree, free, flips, sort, step } = state;
      const current = state.task === null ? null : index.taskOfId.get(state.task) ?? null;
      const wanted = JSON.stringify([q, right, model, searched, end, agree, free, flips, sort, step]);
      if (wanted !== selected) {
        selected = wanted;
        selection = svrlViewer.select(index, state);
        list.show(selection, current);
        strip.show(selection, state);
        byId("count").textContent = svrlViewer.countText(selection, index);
      } else if (current !== list.current) {
        list.mark(current);
      }
      filters.show(state);
      const place = state.task === null ? "list" : "question";
      if (document.body.dataset.view !== place) document.body.dataset.view = place;
      question.show(state);
    }

    window.addEventListener("popstate", () => {
      state = route.parse(location.hash);
      draw();
    });
    byId("list").addEventListener("click", (event) => {
      const anchor = event.target.closest("a");
      if (!anchor || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
      event.preventDefault();
      go({ task: route.parse(anchor.hash).task, at: null });
    });

    const commands = {
      j: () => move(1),
      k: () => move(-1),
      s: () => go({ at: state.at === null ? 1 : null }, true),
      t: () => index.has_tokens && go({ tokens: state.tokens ? "" : "mask" }, true),
      "/": () => byId("search").focus(),
      "?": () => byId("keys").showModal(),
      "[": () => moveStep(-1),
      "]": () => moveStep(1),
      ArrowRight: () => state.task !== null && question.step(1),
      ArrowLeft: () => state.task !== null && question.step(-1),
      Escape: () => {
        if (state.at !== null) go({ at: null }, true);
        else if (state.task !== null) go({ task: null });
      },
    };

    function moveStep(by) {
      if (!index.steps.length) return;
      const place = Math.min(Math.max(index.steps.indexOf(state.step) + by, -1), index.steps.length - 1);
      go({ step: place < 0 ? null : index.steps[place] }, true);
    }

    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
      const field = event.target.closest?.("input, select");
      const isOwnKey = field && (field.type !== "range" || /^(?:Arrow|Home|End|Page)/.test(event.key));
      if (isOwnKey) {
        if (event.key === "Escape") field.blur();
        return;
      }
      const digit = /^(?:Digit|Numpad)([1-9])$/.exec(event.code);
      const inList = event.target.closest?.("#list");
      const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (digit && event.shiftKey) question.toggleModel(Number(digit[1]) - 1);
      else if (digit) index.models[digit[1] - 1] && question.showModels([digit[1] - 1]);
      else if (by && inList) move(by);
      else if (Object.hasOwn(commands, event.key)) commands[event.key]();
      else return;
      event.preventDefault();
    });

    const runs = [...new Set(index.models.map((model) => model.run))];
    byId("about").append(outside(runs.slice(0, 4).join(", ")), ` · ${plural(index.count, "episode")} · made ${index.made.slice(0, 16).replace("T", " ")}`);
    keysDialog();
    draw();
    document.body.dataset.ready = "yes";
    svrlViewer.prepareSearch(index);
  });

  function keysDialog() {
    const close = el("button", { type: "button", class: "plain", click: () => byId("keys").close() }, "Close");
    byId("keys").replaceChildren(el("h2", {}, "Keys"),
      el("dl", {}, KEYS.map(([key, meaning]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, meaning)])), close);
    byId("help").addEventListener("click", () => byId("keys").showModal());
  }

  function setTheme(name) {
    if (name === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    byId("theme").textContent = `Theme: ${name}`;
  }

  let theme = "system";
  try {
    theme = localStorage.getItem("svrl-theme") || "system";
  } catch {
    // some browsers keep nothing for pages from disk
  }
  setTheme(THEMES.includes(theme) ? theme : "system");
  byId("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    setTheme(theme);
    try {
      localStorage.setItem("svrl-theme", theme);
    } catch {
      // as above
    }
  });
})();
