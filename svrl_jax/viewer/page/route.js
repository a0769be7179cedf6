// The state of the page <-> its address: #/ or #/q/QUESTION, then ?what=is&set.
//
//   q search text · right.MODEL right|wrong · model scope of the next four · searched yes|no|image|text
//   end reason · agree all|some|none|unlabelled · free yes|no · flips 1 · sort · step of training
//   models shown, with commas · pick.MODEL step.sample · at step stepped to · tokens measure
"use strict";

(function () {
  const WORDS = ["q", "model", "searched", "end", "agree", "free", "flips", "sort", "tokens"];

  /** Address -> state. What it does not name is empty. */
  function parse(hash) {
    const [path, query = ""] = splitOnce(hash.replace(/^#/, ""), "?");
    const given = new URLSearchParams(query);
    const state = { task: null, right: {}, picks: {}, models: [], step: null, at: null };
    for (const word of WORDS) state[word] = given.get(word) || "";
    if (path.startsWith("/q/")) {
      try {
        state.task = decodeId(path.slice(3));
      } catch {
        state.task = path.slice(3); // shown as a question that is not there
      }
    }
    for (const [name, value] of given) {
      if (name.startsWith("right.")) state.right[name.slice(6)] = value;
      if (name.startsWith("pick.")) state.picks[name.slice(5)] = value;
    }
    state.models = (given.get("models") || "").split(",").filter(Boolean);
    if (/^\d+$/.test(given.get("step") || "")) state.step = Number(given.get("step"));
    if (/^\d+$/.test(given.get("at") || "")) state.at = Number(given.get("at"));
    return state;
  }

  /** State -> address. */
  function format(state) {
    const query = new URLSearchParams();
    for (const word of WORDS) if (state[word]) query.set(word, state[word]);
    for (const [key, value] of Object.entries(state.right)) if (value) query.set(`right.${key}`, value);
    for (const [key, value] of Object.entries(state.picks)) if (value) query.set(`pick.${key}`, value);
    if (state.models.length) query.set("models", state.models.join(","));
    if (state.step !== null) query.set("step", state.step);
    if (state.at !== null) query.set("at", state.at);
    const path = state.task === null ? "#/" : `#/q/${encodeId(state.task)}`;
    const text = query.toString();
    return text ? `${path}?${text}` : path;
  }

  // Half a character, which some ids hold, has no code in addresses: it is written %uD800, and no other
  // letter is written so.
  const encodeId = (id) =>
    id.split(/(\p{Cs})/u).map((part) => (/^\p{Cs}$/u.test(part) ? `%u${part.charCodeAt(0).toString(16)}` : encodeURIComponent(part))).join("");
  const decodeId = (text) =>
    text.split(/(%u[0-9a-f]{4})/).map((part) => (/^%u/.test(part) ? String.fromCharCode(parseInt(part.slice(2), 16)) : decodeURIComponent(part))).join("");

  function splitOnce(text, sign) {
    const place = text.indexOf(sign);
    return place < 0 ? [text] : [text.slice(0, place), text.slice(place + 1)];
  }

  svrlViewer.route = { parse, format };
})();
