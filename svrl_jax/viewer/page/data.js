// The page's data: the index, and chunks that are loaded when they are looked at.
//
// A chunk is a classic script that calls svrlViewer.receive(name, value): pages opened from disk may
// not fetch files. Only names of one form are ever loaded, under a policy of that name.
"use strict";

const svrlViewer = {};

(function () {
  const SCHEMA = 1;
  const NAME = /^(?:episodes|tokens)_[0-9a-f]{20}$/;
  const KEPT_CHUNKS = 24;
  const LABEL_CHARS = 120;

  const waiting = new Map(); // name -> {promise, resolve, reject}
  const kept = new Map(); // name -> value, oldest first
  let onIndex = null;
  let early = null;

  const policy = window.trustedTypes
    ? trustedTypes.createPolicy("svrl-chunks", { createScriptURL: chunkAddress })
    : { createScriptURL: chunkAddress };

  function chunkAddress(name) {
    if (!NAME.test(name)) throw new TypeError(`no chunk is called ${name}`);
    return `data/${name}.js`;
  }

  /** Takes what a data script brings. */
  svrlViewer.receive = function (name, value) {
    if (name === "index") {
      if (onIndex) onIndex(value);
      else early = value;
      return;
    }
    kept.set(name, value);
    if (kept.size > KEPT_CHUNKS) kept.delete(kept.keys().next().value);
    const waiter = waiting.get(name);
    if (waiter) waiter.resolve(value);
    waiting.delete(name);
  };

  /** Calls `take(index)` once the index is there. */
  svrlViewer.whenIndexed = function (take) {
    onIndex = (value) => take(new svrlViewer.Index(value));
    if (early) onIndex(early);
  };

  /** A promise of a chunk's value. */
  svrlViewer.load = function (name) {
    if (kept.has(name)) return Promise.resolve(kept.get(name));
    if (waiting.has(name)) return waiting.get(name).promise;
    const waiter = {};
    waiter.promise = new Promise((resolve, reject) => Object.assign(waiter, { resolve, reject }));
    waiting.set(name, waiter);
    const script = document.createElement("script");
    script.src = policy.createScriptURL(name);
    script.onerror = () => {
      waiting.delete(name);
      waiter.reject(new Error("This part is missing: the page may have been made anew. Reload it."));
    };
    script.onload = () => script.remove();
    document.head.append(script);
    return waiter.promise;
  };

  /** Questions, models and one line an episode, by columns. */
  svrlViewer.Index = class {
    constructor(value) {
      if (value.schema !== SCHEMA) throw new Error(`data of schema ${value.schema}, not ${SCHEMA}`);
      Object.assign(this, value);
      this.count = this.episodes.task.length;
      this.byTask = this.tasks.map(() => []); // question -> numbers of its episodes
      this.haystacks = new Array(this.tasks.length); // question -> text to search, once it is made
      this.labels = this.models.map((_, number) => svrlViewer.spelled(svrlViewer.cut(this.rawLabel(number), LABEL_CHARS)));
      for (let e = 0; e < this.count; e++) this.byTask[this.episodes.task[e]].push(e);
      this.taskOfId = new Map(this.tasks.map((task, number) => [task.id, number]));
      this.modelOfKey = new Map(this.models.map((model, number) => [model.key, number]));
      const steps = new Set(this.episodes.step);
      steps.delete(-1);
      this.steps = [...steps].sort((a, b) => a - b);
    }

    /** Name of a model's column; what all models share is left out. Hidden characters are spelt. */
    label(number) {
      return this.labels[number];
    }

    rawLabel(number) {
      const model = this.models[number];
      const parts = [];
      for (const field of ["run", "policy", "regime", "how"]) {
        const differs = this.models.some((other) => other[field] !== model[field]);
        if (differs && !parts.includes(model[field])) parts.push(model[field]);
      }
      if (!parts.length) parts.push(model.policy, model.how);
      return model.is_training && !parts.includes("training")
        ? [...parts, "training"].join(" · ")
        : parts.join(" · ");
    }

    /** {view, task} of an episode. */
    async episode(number) {
      const chunk = await svrlViewer.load(`episodes_${this.chunks[this.episodes.chunk[number]]}`);
      const view = chunk.episodes[this.episodes.place[number]];
      return { view, task: chunk.tasks[view.task] };
    }

    /** Token view of an episode. */
    async tokens(number) {
      const chunk = await svrlViewer.load(`tokens_${this.chunks[this.episodes.chunk[number]]}`);
      return chunk[this.episodes.place[number]];
    }
  };
})();
