// One episode without the rest of the page: its data stand beside the script, in the same document.
"use strict";

(function () {
  const { el, passage, picture, episode, tokenPanel } = svrlViewer;
  const data = JSON.parse(document.getElementById("data").textContent);
  const { view, task, tokens, pictures } = data;
  svrlViewer.pictureAddress = (name, size) => pictures[`${name}_${size}.webp`];

  const tokenPart = el("div");
  const showTokens = (measure) => tokenPart.replaceChildren(tokenPanel(tokens, measure, showTokens, "this episode"));
  const tokenDetails = el("details", { class: "raw", toggle: () => tokenDetails.open && showTokens("mask") }, el("summary", {}, "Tokens"), tokenPart);

  document.body.append(
    el("header", { class: "question-body" },
      task.picture ? el("div", { class: "enlarge" }, picture(task.picture, "large", "The question's picture")) : null,
      el("div", {}, el("h2", {}, task.question ? passage(task.question, 2000) : "(question not recorded)"), episode.head(view))),
    el("div", { class: "inline-turns" }, view.turns.map((_, i) => episode.turn(view, i)), episode.outcome(view, task), tokenDetails));
  document.body.dataset.ready = "yes";
})();
