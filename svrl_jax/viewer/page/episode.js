// One episode, drawn in parts: its head, each turn, its outcome. question.js puts them side by side.
"use strict";

(function () {
  const { el, icon, outside, passage, link, picture, number, percent, grouped, plural, brief, many } = svrlViewer;
  const REASON_CHARS = 1200;
  const SUMMARY_CHARS = 420;
  const RAW_CHARS = 4000;
  const QUERY_CHARS = 300;
  const MANY = 50; // items or proposals drawn before they are asked for
  const ACTIONS = { image_search: "Image search", text_search: "Text search", answer: "Answer" };
  const ENDS = {
    answered: "answered", malformed: "malformed turn", tool_limit: "one search too many", budget: "out of budget",
  };
  const FACTORS = [
    ["r_acc", "answer right"], ["r_aware", "search-aware"], ["r_count", "query diversity"],
    ["r_qalign", "queries verified"], ["r_salign", "snippets verified"], ["r_format", "format"],
  ];

  // What a judge said of a query -> the sign and colour beside the words.
  const JUDGED = { good: "right", poor: "wrong", "no verdict": "unknown" };

  const verdictOf = (right) => (right === null ? "unknown" : right ? "right" : "wrong");
  const VERDICTS = { right: "Right", wrong: "Wrong", unknown: "Not judged" };

  function verdict(right) {
    const name = verdictOf(right);
    return el("span", { class: `verdict ${name}` }, icon(name), VERDICTS[name]);
  }

  function seconds(value) {
    if (value >= 1) return `${value.toFixed(1)} s`;
    return value < 0.001 ? "< 1 ms" : `${Math.round(1000 * value)} ms`;
  }

  /** Result, reward, end and sizes of an episode. */
  function head(view) {
    const facts = [
      ENDS[view.end] || view.end,
      `${plural(view.turns.length, "turn")}`,
      `${grouped(view.tokens)} tokens (${grouped(view.prompt_tokens)} prompt, ${grouped(view.policy_tokens)} policy)`,
    ];
    if (view.turn_seconds !== null) facts.push(`sampling ${seconds(view.turn_seconds)}`);
    if (view.seconds) facts.push(`tools ${seconds(view.seconds)}`);
    return el("div", { class: "episode-head" },
      el("div", { class: "badges" }, verdict(view.right),
        view.score ? el("span", { class: "badge" }, "reward ", el("b", {}, number(view.score.total, 3))) : null,
        view.agreement !== null ? el("span", { class: "badge" }, "mask agreement ", el("b", {}, percent(view.agreement))) : null,
        view.free === null ? null : el("span", { class: "badge" }, view.free ? "search_free" : "needs search"),
        view.score && !view.score.valid ? el("span", { class: "badge warn" }, "left out: ", brief(view.score.invalid_cause, 80)) : null),
      el("p", { class: "facts" }, facts.join(" · ")));
  }

  /** A turn: reason, action, what came back. */
  function turn(view, number_) {
    const one = view.turns[number_];
    const { call } = one;
    const name = ACTIONS[one.action] || "No readable action";
    const facts = [plural(one.tokens, "token")];
    if (one.seconds !== null) facts.push(seconds(one.seconds));
    if (one.environment_tokens) facts.push(`+${grouped(one.environment_tokens)} from outside`);
    if (call && call.seconds) facts.push(`search ${seconds(call.seconds)}`); // 0: not recorded
    if (number_ === view.turns.length - 1) facts.push(ENDS[view.end] || view.end);
    return el("section", { class: "turn" },
      el("header", { class: "turn-head" },
        icon(one.action || "none"), el("h3", {}, `${number_ + 1}. ${name}`),
        el("span", { class: "facts" }, facts.join(" · "))),
      one.violations.length
        ? el("p", { class: "violations" }, "Breaks the format: ", one.violations.map((v) => el("code", {}, brief(v, 80))))
        : null,
      one.reason ? passage(one.reason, REASON_CHARS, "reason") : el("p", { class: "hint" }, "No reason was written."),
      verifyLine(view, number_),
      one.proposals.length || one.ill_formed ? proposals(one) : null,
      one.answer !== null ? el("p", { class: "final" }, "Answer: ", passage(one.answer, REASON_CHARS)) : null,
      call ? results(call) : null,
      el("details", { class: "raw" }, el("summary", {}, "As it was written"), passage(one.text, RAW_CHARS, "code")));
  }

  /** The mask of the turn, which is about what came back before it. */
  function verifyLine(view, number_) {
    const { mask, mask_wanted: wanted } = view.turns[number_];
    if (mask === null && wanted === null) return null;
    if (mask === null) return el("p", { class: "verify" }, el("span", { class: "label" }, "Verify"), "no readable mask");
    if (!mask.length) return el("p", { class: "verify" }, el("span", { class: "label" }, "Verify"), "empty: nothing to verify");
    const isFitting = mask.length === wanted;
    const marks = mask.slice(0, 40).map((bit) => icon(bit ? "kept" : "dropped", bit ? "kept" : "dropped"));
    const kept = mask.filter(Boolean).length;
    return el("p", { class: "verify" }, el("span", { class: "label" }, "Verify"),
      el("span", { class: "marks" }, marks), `keeps ${kept} of ${mask.length}`,
      isFitting ? null : el("span", { class: "badge warn" }, `${wanted ?? 0} items were shown`));
  }

  function proposals(one) {
    const lines = many(el("ol"), one.proposals, MANY, (proposal) => {
      return el("li", { class: proposal.executed ? "executed" : null },
        proposal.duplicate ? el("s", {}, brief(proposal.text, QUERY_CHARS)) : passage(proposal.text, QUERY_CHARS, "query"),
        proposal.executed ? el("span", { class: "badge strong" }, "executed") : null,
        proposal.duplicate ? el("span", { class: "badge" }, "duplicate") : null,
        proposal.proposed ? null : el("span", { class: "badge warn" }, "not proposed"),
        proposal.good === null ? null
          : el("span", { class: `badge ${proposal.good ? "right" : "wrong"}` },
            icon(proposal.good ? "useful" : "useless"), `oracle: ${proposal.good ? "good" : "poor"} query`),
        proposal.judged === null ? null
          : el("span", { class: `badge ${JUDGED[proposal.judged]}` },
            icon(JUDGED[proposal.judged]), `judge: ${proposal.judged}`));
    });
    return el("div", { class: "proposals" }, el("span", { class: "label" }, "Proposed queries"), lines,
      one.ill_formed > 0 ? el("p", { class: "hint" }, `${one.ill_formed} more not well-formed`) : null);
  }

  function results(call) {
    const parts = [];
    if (call.status === "failed") {
      parts.push(el("p", { class: "failed" }, icon("wrong"), "The search did not answer",
        call.failure ? [" (", brief(call.failure, 80), ")"] : null, call.error ? ": " : ".", call.error ? passage(call.error, SUMMARY_CHARS) : null));
    } else if (!call.items.length) {
      parts.push(el("p", { class: "hint" }, call.num_found ? "Nothing that was found could be shown." : "Nothing was found."));
    } else {
      const left = call.num_found - call.items.length;
      parts.push(el("p", { class: "label" }, `${plural(call.items.length, "result")} shown`,
        left > 0 ? `, ${left} left out` : "",
        call.is_verified && !call.has_mask ? "; no readable mask followed" : ""));
      parts.push(many(el("ol", { class: "cards" }), call.items, MANY, card));
    }
    return el("div", { class: "results" }, parts);
  }

  function card(item, number_) {
    const judged = item.kept !== null && item.useful !== null;
    const relation = judged ? (item.kept === item.useful ? "agree" : "disagree") : "alone";
    return el("li", { class: `card ${relation}${item.kept === 0 ? " was-dropped" : ""}` },
      item.picture ? picture(item.picture, "small", `Picture of result ${number_ + 1}`) : null,
      el("div", { class: "card-body" },
        el("p", { class: "card-title" }, el("span", { class: "place" }, `${number_ + 1}`),
          item.title ? passage(item.title, 200) : el("span", { class: "hint" }, "untitled"),
          item.is_evidence ? el("span", { class: "badge strong" }, "evidence") : null),
        item.link ? el("p", { class: "card-link" }, link(item.link), item.provider ? [" · ", brief(item.provider, 80)] : null) : null,
        item.text ? passage(item.text, SUMMARY_CHARS, "summary") : null,
        marks(item, relation)));
  }

  /** What the agent and the oracle said of an item: words and shapes first, colour after. */
  function marks(item, relation) {
    if (item.kept === null && item.useful === null) return null;
    const agent = item.kept === null ? null
      : el("span", { class: "mark" }, icon(item.kept ? "kept" : "dropped"), item.kept ? "agent kept" : "agent dropped");
    const oracle = item.useful === null ? null
      : el("span", { class: "mark" }, icon(item.useful ? "useful" : "useless"), item.useful ? "oracle: useful" : "oracle: not useful");
    const both = relation === "alone" ? null
      : el("span", { class: `mark relation ${relation}` }, icon(relation), relation === "agree" ? "agree" : "disagree");
    return el("p", { class: "item-marks" }, agent, oracle, both);
  }

  /** Answer against golds, and the reward factor by factor. */
  function outcome(view, task) {
    const answer = view.answer === null || view.answer === undefined
      ? el("p", { class: "no-answer" }, `No answer: ${ENDS[view.end] || view.end}.`)
      : el("div", { class: `answer ${verdictOf(view.right)}` }, icon(verdictOf(view.right)), passage(view.answer, REASON_CHARS));
    const golds = task.golds.length
      ? el("div", { class: "golds" }, el("span", { class: "label" }, "Accepted"), goldList(task.golds))
      : el("p", { class: "hint" }, "No accepted answer was recorded.");
    return el("section", { class: "outcome" }, el("h3", {}, "Outcome"), answer, verdicts(view), golds, factors(view), sources(view));
  }

  /** What each scorer says of the answer: sign, name and words. The first counts. */
  function verdicts(view) {
    if (!view.verdicts.length) return null;
    const marks = view.verdicts.map(({ scorer, value, grade, cause }) => {
      const name = verdictOf(value === null ? null : value >= 1);
      const isPart = value !== null && value > 0 && value < 1;
      const words = value === null ? ["unscored", cause] : [grade ? grade.replaceAll("_", " ") : isPart ? number(value, 3) : name];
      return el("li", { class: `badge ${name}` }, icon(name), brief(scorer, 40), ": ", brief(words.filter(Boolean).join(", "), 80));
    });
    return el("div", { class: "verdicts" }, el("span", { class: "label" }, "Scored by"), el("ul", {}, marks));
  }

  /** Who labelled items and queries, where that is known. */
  function sources(view) {
    const named = [["Oracle", view.oracle], ["Judge of queries", view.query_judge]].filter(([, name]) => name);
    if (!named.length) return null;
    return el("p", { class: "facts" }, named.map(([what, name]) => el("span", { class: "fact" }, `${what}: `, brief(name, 80))));
  }

  function goldList(golds) {
    const shown = golds.slice(0, 6).map((gold) => el("span", { class: "gold" }, passage(gold, 200)));
    return [...shown, golds.length > 6 ? el("span", { class: "hint" }, `and ${golds.length - 6} more`) : null];
  }

  function factors(view) {
    const values = view.score || view.computed;
    const rows = FACTORS.map(([name, meaning]) => {
      const value = values[name] ?? null;
      const filled = el("span", { class: "bar-filled" });
      filled.style.width = `${100 * Math.min(1, Math.max(0, value ?? 0))}%`;
      return el("tr", {}, el("th", { scope: "row" }, el("code", {}, name), " ", el("span", { class: "hint" }, meaning)),
        el("td", { class: "figure" }, number(value, 3)),
        el("td", {}, el("span", { class: "bar", "aria-hidden": "true" }, filled)));
    });
    if (view.score) {
      rows.push(el("tr", { class: "total" }, el("th", { scope: "row" }, "R"), el("td", { class: "figure" }, number(view.score.total, 3)), el("td")));
    }
    const note = view.score ? null
      : el("p", { class: "hint" }, "No reward was recorded. ",
        view.computed.is_ours ? ["The answer is scored by ", brief(view.computed.scorer, 40), " here; the"] : "The",
        " other factors need the run's reward.");
    const advantage = view.advantage === null ? null
      : el("p", { class: "facts" }, `advantage ${view.advantage >= 0 ? "+" : "−"}${number(Math.abs(view.advantage), 3)}`);
    return el("div", { class: "factors" }, el("table", {}, el("caption", { class: "visually-hidden" }, "Reward factors"), el("tbody", {}, rows)), advantage, note);
  }

  svrlViewer.episode = { head, turn, outcome };
})();
