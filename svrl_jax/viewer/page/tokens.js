// The token view of an episode: what the trainer saw, token by token, by one of four measures.
"use strict";

(function () {
  const { el, spelled, number, grouped } = svrlViewer;
  const MAX_TOKENS = 40000; // drawn
  const MEASURES = [["mask", "loss mask"], ["logp", "log-prob"], ["gap", "sampler–trainer gap"], ["advantage", "advantage"]];
  // Upper ends of the classes; a value above all is in the last one. Log-probs by size, gaps by size.
  const LOGP_ENDS = [0.1, 0.5, 1, 2, 4];
  const GAP_ENDS = [0.001, 0.01, 0.05, 0.2, 1];

  const classOf = (value, ends) => {
    const place = ends.findIndex((end) => Math.abs(value) <= end);
    return place < 0 ? ends.length : place;
  };

  /** Class of one entry under a measure. */
  function mark(data, measure, entry, policyPlace) {
    if (!data.mask[entry]) return "outside-policy";
    const logp = data.logps ? data.logps[policyPlace] : null;
    const gap = data.gaps ? data.gaps[policyPlace] : null;
    if (measure === "logp" && logp !== null) return `level-${classOf(logp, LOGP_ENDS)}`;
    if (measure === "gap" && gap !== null) return `level-${classOf(gap, GAP_ENDS)}`;
    if (measure === "advantage" && data.advantage !== null) {
      return data.advantage > 0 ? "gain" : data.advantage < 0 ? "loss" : "level-0";
    }
    return measure === "mask" ? "trained" : "unknown-value";
  }

  const visibleToken = (text) =>
    spelled(text).replace(/\n/g, "⏎\n").replace(/\t/g, "⇥").replace(/^ $/, "␣");

  function legend(data, measure) {
    const swatch = (name, text) => el("span", { class: "legend-item" }, el("span", { class: `tok ${name}` }, "abc"), text);
    const items = [swatch("outside-policy", "not the policy's (loss mask 0)")];
    const steps = (ends, sign) => ends.map((end, i) => swatch(`level-${i}`, `${sign}${end}`)).concat(swatch(`level-${ends.length}`, "beyond"));
    if (measure === "mask") items.unshift(swatch("trained", "loss mask 1"));
    else if (measure === "logp") items.unshift(...(data.logps ? steps(LOGP_ENDS, "≥ −") : [el("span", {}, "no sampler log-probs were recorded")]));
    else if (measure === "gap") items.unshift(...(data.gaps ? steps(GAP_ENDS, "± ") : [el("span", {}, "the trainer's log-probs were not recorded")]));
    else items.unshift(data.advantage === null ? el("span", {}, "no advantage was recorded")
      : swatch(data.advantage > 0 ? "gain" : data.advantage < 0 ? "loss" : "level-0", `advantage ${number(data.advantage, 4)}, on every token of the policy`));
    return el("p", { class: "legend" }, items);
  }

  /** A panel for one episode's tokens. `setMeasure(name)` is called when another is chosen. */
  svrlViewer.tokenPanel = function (data, measure, setMeasure, name) {
    if (!data) return el("p", { class: "hint" }, "This page was made without tokens.");
    const chosen = MEASURES.some(([key]) => key === measure) ? measure : "mask";
    const readout = el("p", { class: "readout", role: "status" }, "Point at a token, or step through them with the arrow keys.");
    const tokens = [];
    const about = [];
    let place = 0; // of the token in the episode
    let policyPlace = 0;
    const count = Math.min(data.texts.length, MAX_TOKENS);
    for (let entry = 0; entry < count; entry++) {
      const style = mark(data, chosen, entry, policyPlace);
      const repeats = data.counts[entry];
      const token = el("span", { class: `tok ${style}` }, visibleToken(data.texts[entry]), repeats > 1 ? ` ×${repeats}` : null);
      tokens.push(token);
      about.push(describe(data, entry, place, policyPlace));
      place += repeats;
      if (data.mask[entry]) policyPlace += 1;
    }
    const group = el("div", { class: "token-text", tabindex: "0", role: "group", "aria-label": `Tokens of ${name}` }, tokens);
    let current = -1;
    const point = (entry) => {
      if (entry < 0 || entry >= tokens.length) return;
      if (current >= 0) tokens[current].classList.remove("at");
      current = entry;
      tokens[current].classList.add("at");
      readout.textContent = about[entry];
    };
    const places = new Map(tokens.map((token, entry) => [token, entry]));
    group.addEventListener("mouseover", (event) => places.has(event.target) && point(places.get(event.target)));
    group.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || event.altKey || event.ctrlKey || event.metaKey) return;
      point(Math.min(Math.max(current + by, 0), tokens.length - 1));
      tokens[current].scrollIntoView({ block: "nearest" });
      event.preventDefault();
      event.stopPropagation();
    });
    const choices = el("div", { class: "measures", role: "group", "aria-label": "Measure" }, MEASURES.map(([key, label]) =>
      el("button", { type: "button", class: "choice", "aria-pressed": String(key === chosen), click: () => setMeasure(key) }, label)));
    return el("section", { class: "tokens", "aria-label": "Tokens" }, choices, legend(data, chosen),
      data.spelt ? null : el("p", { class: "hint" }, "The policy's tokenizer was not found: ids are shown. --tokenizer=FOLDER names it."),
      count < data.texts.length ? el("p", { class: "hint" }, `The first ${grouped(place)} tokens are shown.`) : null,
      group, readout);
  };

  function describe(data, entry, place, policyPlace) {
    const count = data.counts[entry];
    const where = count > 1 ? `tokens ${place}–${place + count - 1}` : `token ${place}`;
    if (!data.mask[entry]) return `${where}: not the policy's, loss mask 0`;
    const parts = [`${where}: the policy's, loss mask 1`];
    if (data.logps) parts.push(`log-prob ${number(data.logps[policyPlace], 4)}`);
    if (data.gaps) parts.push(`trainer − sampler ${number(data.gaps[policyPlace], 4)}`);
    if (data.advantage !== null) parts.push(`advantage ${number(data.advantage, 4)}`);
    return parts.join(", ");
  }
})();
