// State -> the questions that pass, in order, and the figures of each model over them.
"use strict";

(function () {
  const AGREED = 0.9995; // figures are rounded to four digits

  /** Whether an episode belongs to the step looked at; what is no training belongs to all. */
  const isAtStep = (index, e, step) =>
    step === null || index.episodes.step[e] === -1 || index.episodes.step[e] === step;

  function agreement(index, e) {
    const { agreement, outputs } = index.episodes;
    return outputs[e] ? agreement[e] / outputs[e] : null;
  }

  /** A test of one episode, made of the filters about how it went. */
  function episodeTest(index, state) {
    const { model, tools, end } = index.episodes;
    const tests = [];
    const scope = index.modelOfKey.get(state.model);
    if (scope !== undefined) tests.push((e) => model[e] === scope);
    if (state.searched === "yes") tests.push((e) => tools[e] !== 0);
    if (state.searched === "no") tests.push((e) => tools[e] === 0);
    if (state.searched === "image") tests.push((e) => (tools[e] & 1) !== 0);
    if (state.searched === "text") tests.push((e) => (tools[e] & 2) !== 0);
    const reason = index.ends.indexOf(state.end);
    if (reason >= 0) tests.push((e) => end[e] === reason);
    if (state.agree) {
      tests.push((e) => {
        const share = agreement(index, e);
        if (state.agree === "unlabelled") return share === null;
        if (share === null) return false;
        if (state.agree === "all") return share >= AGREED;
        if (state.agree === "none") return share <= 1 - AGREED;
        return share < AGREED;
      });
    }
    return tests.length ? (e) => tests.every((test) => test(e)) : null;
  }

  /** Whether one model is mostly right and another is not; one without a verdict is neither. */
  function isFlip(index, episodes) {
    const { right, model } = index.episodes;
    const sums = new Map(); // model -> right ones less wrong ones
    for (const e of episodes) {
      if (right[e] >= 0) sums.set(model[e], (sums.get(model[e]) ?? 0) + (right[e] ? 1 : -1));
    }
    let [some, others] = [false, false];
    for (const sum of sums.values()) {
      if (sum >= 0) some = true;
      else others = true;
    }
    return some && others;
  }

  function passesRight(index, episodes, wanted) {
    return wanted.every(([model, verdict]) =>
      episodes.some((e) =>
        index.episodes.model[e] === model && index.episodes.right[e] === (verdict === "right" ? 1 : 0)));
  }

  /** What a search looks through, of one question. */
  function haystack(index, task) {
    if (index.haystacks[task] === undefined) {
      const { id, question, category, source } = index.tasks[task];
      let text = `${id}\n${question}\n${category}\n${source}`;
      for (const e of index.byTask[task]) text += `\n${index.episodes.answer[e]}`;
      index.haystacks[task] = text.toLowerCase();
    }
    return index.haystacks[task];
  }

  /** Makes the texts of all questions while nothing else is to be done. */
  function prepareSearch(index) {
    let task = 0;
    const go = (deadline) => {
      while (task < index.tasks.length && deadline.timeRemaining() > 1) {
        for (const end = Math.min(task + 50, index.tasks.length); task < end; task++) haystack(index, task);
      }
      if (task < index.tasks.length) later(go);
    };
    // Not every browser knows idle time: there a few questions at a time make no pause that is felt.
    const later = window.requestIdleCallback ?? ((take) => setTimeout(() => take({ timeRemaining: () => 0 })));
    later(go);
  }

  const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

  const SORTS = {
    "reward-low": (index, es) => mean(es.map((e) => index.episodes.reward[e]).filter((r) => r !== null)),
    "reward-high": (index, es) => negative(SORTS["reward-low"](index, es)),
    "calls": (index, es) => negative(mean(es.map((e) => index.episodes.calls[e]))),
    "agreement": (index, es) => mean(es.map((e) => agreement(index, e)).filter((a) => a !== null)),
    "right": (index, es) => mean(es.map((e) => index.episodes.right[e]).filter((r) => r >= 0)),
  };
  const negative = (value) => (value === null ? null : -value);

  /** {tasks, episodes}: numbers of the questions that pass, in order; and of their episodes. */
  function select(index, state) {
    const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
    const test = episodeTest(index, state);
    const wanted = Object.entries(state.right)
      .map(([key, verdict]) => [index.modelOfKey.get(key), verdict])
      .filter(([model, verdict]) => model !== undefined && /^(?:right|wrong)$/.test(verdict));
    const free = { yes: 1, no: 0 }[state.free];
    const tasks = [];
    const shown = new Map();
    for (let task = 0; task < index.tasks.length; task++) {
      let episodes = index.byTask[task];
      if (state.step !== null) {
        if (!episodes.some((e) => index.episodes.step[e] === state.step)) continue;
        episodes = episodes.filter((e) => isAtStep(index, e, state.step));
      }
      if (words.length && !words.every((word) => haystack(index, task).includes(word))) continue;
      if (test && !episodes.some(test)) continue;
      if (wanted.length && !passesRight(index, episodes, wanted)) continue;
      if (free !== undefined && !episodes.some((e) => index.episodes.free[e] === free)) continue;
      if (state.flips && !isFlip(index, episodes)) continue;
      tasks.push(task);
      shown.set(task, episodes);
    }
    sort(index, state.sort, tasks, shown);
    return { tasks, episodes: shown };
  }

  /** In place; questions without the figure come last, ties stay as recorded. */
  function sort(index, name, tasks, episodes) {
    if (name === "question") {
      tasks.sort((a, b) => (index.tasks[a].question < index.tasks[b].question ? -1 : 1));
    } else if (Object.hasOwn(SORTS, name)) {
      const values = new Map(tasks.map((task) => [task, SORTS[name](index, episodes.get(task))]));
      tasks.sort((a, b) => {
        const [x, y] = [values.get(a), values.get(b)];
        return x === null ? (y === null ? a - b : 1) : y === null ? -1 : x - y || a - b;
      });
    }
  }

  /** Figures of each model over a selection: count, acc, sr, agreement, reward; null where undefined. */
  function figures(index, { tasks, episodes }) {
    const columns = index.episodes;
    const sums = index.models.map(() => ({ n: 0, right: 0, judged: 0, searched: 0, agreed: 0, outputs: 0, reward: 0, scored: 0 }));
    for (const task of tasks) for (const e of episodes.get(task)) {
      const sum = sums[columns.model[e]];
      sum.n += 1;
      if (columns.right[e] >= 0) {
        sum.judged += 1;
        sum.right += columns.right[e];
      }
      sum.searched += columns.tools[e] !== 0;
      sum.agreed += columns.agreement[e];
      sum.outputs += columns.outputs[e];
      if (columns.reward[e] !== null) {
        sum.scored += 1;
        sum.reward += columns.reward[e];
      }
    }
    const ratio = (a, b) => (b ? a / b : null);
    return sums.map((s) => ({
      n: s.n,
      acc: ratio(s.right, s.judged),
      sr: ratio(s.searched, s.n),
      agreement: ratio(s.agreed, s.outputs),
      reward: ratio(s.reward, s.scored),
    }));
  }

  svrlViewer.select = select;
  svrlViewer.prepareSearch = prepareSearch;
  svrlViewer.figures = figures;
  svrlViewer.isAtStep = isAtStep;
})();
