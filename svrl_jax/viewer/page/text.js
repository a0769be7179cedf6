// Elements, and text of others. Whatever came from outside becomes a text node: there is no other way
// in this page to put a string into it.
"use strict";

(function () {
  const ATTRIBUTES = /^(?:class|id|type|role|tabindex|title|for|name|value|min|max|step|placeholder|dir|aria-[a-z]+|data-[a-z-]+|disabled|checked|selected|hidden|scope|colspan|start|list|autocomplete|spellcheck|open|headers)$/;
  const SVG = "http://www.w3.org/2000/svg";
  const ICONS = {
    right: "M3 8.6l3.2 3.2L13 4.4",
    wrong: "M4 4l8 8M12 4l-8 8",
    unknown: "M5.6 6a2.4 2.4 0 1 1 3.4 2.2c-.7.4-1 .8-1 1.6M8 12.4v.2",
    image_search: "M2.5 3.5h11v9h-11zM2.5 10.5l3.2-3.2 2.6 2.6 1.8-1.7 3.4 3.2M10.2 6.2h.1",
    text_search: "M7 3a4 4 0 1 0 0 8a4 4 0 1 0 0-8M10 10l3.4 3.4",
    answer: "M2.5 3.5h11v7h-6l-3 2.7v-2.7h-2z",
    none: "M4 8h8",
    agree: "M4 6.2h8M4 9.8h8",
    disagree: "M4 6.2h8M4 9.8h8M10.4 3.4l-4.8 9.2",
    kept: "M8 4.2a3.8 3.8 0 1 0 0 7.6a3.8 3.8 0 1 0 0-7.6",
    dropped: "M8 4.2a3.8 3.8 0 1 0 0 7.6a3.8 3.8 0 1 0 0-7.6",
    useful: "M8 3.4l4.6 4.6-4.6 4.6-4.6-4.6z",
    useless: "M8 3.4l4.6 4.6-4.6 4.6-4.6-4.6z",
  };
  const FILLED = new Set(["kept", "useful"]);
  // Controls, lone surrogates, marks that turn the direction of text, breaks and blanks that cannot be
  // seen, and tag characters. A line end and a tab are what they are.
  const HIDDEN = /(?![\n\t])[\p{Cc}\p{Cs}\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\u{e0000}-\u{e007f}]/gu;
  const MAX_MARKS = 300; // in one text; further ones are written into the text

  /** An element; attributes from a fixed list, children as nodes or as text. */
  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (typeof value === "function") node.addEventListener(name, value);
      else if (ATTRIBUTES.test(name)) node.setAttribute(name, value === true ? "" : value);
      else throw new TypeError(`attribute ${name} is not set here`);
    }
    for (const child of children) put(node, child);
    return node;
  }

  /** Appends a node, a text, or what a list holds of them; null and undefined are nothing. */
  function put(node, child) {
    if (Array.isArray(child)) for (const one of child) put(node, one);
    else if (child !== null && child !== undefined) node.append(child);
  }

  /** A drawn sign of 16 px; decoration, what it means stands beside it or in `label`. */
  function icon(name, label = "") {
    if (!drawn.has(name)) drawn.set(name, draw(name));
    const svg = drawn.get(name).cloneNode(true);
    if (label) {
      svg.setAttribute("role", "img");
      svg.setAttribute("aria-label", label);
    } else {
      svg.setAttribute("aria-hidden", "true");
    }
    return svg;
  }

  const drawn = new Map(); // sign -> its element, to be copied

  function draw(name) {
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 0 16 16");
    svg.setAttribute("class", `icon icon-${name}${FILLED.has(name) ? " filled" : ""}`);
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", ICONS[name]);
    svg.append(path);
    return svg;
  }

  const codeOf = (character) =>
    `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;

  /** Text of others, apart from the text around it, with hidden characters made visible. */
  function outside(text, className = "") {
    const node = el("bdi", { class: `outside ${className}`.trim(), dir: "auto" });
    let from = 0;
    let marks = 0;
    for (const match of text.matchAll(HIDDEN)) {
      if (marks++ === MAX_MARKS) {
        node.append(spelled(text.slice(from)));
        return node;
      }
      if (match.index > from) node.append(text.slice(from, match.index));
      const code = codeOf(match[0]);
      node.append(el("span", { class: "hidden-character", title: `${code}, not shown as itself` }, code));
      from = match.index + match[0].length;
    }
    node.append(text.slice(from));
    return node;
  }

  /** The same as one string, for places that hold no marks. */
  const spelled = (text) => text.replace(HIDDEN, (c) => `<${codeOf(c)}>`);

  /** The first `limit` characters, none of them torn. */
  function cut(text, limit) {
    const start = text.slice(0, limit);
    return text.length > limit && /[\ud800-\udbff]$/.test(start) ? start.slice(0, -1) : start;
  }

  /** A block of text of others, cut at `limit` characters; a button shows all of it. */
  function passage(text, limit, className = "") {
    const block = el("div", { class: `passage ${className}`.trim() });
    if (text.length <= limit) {
      block.append(outside(text));
      return block;
    }
    const button = el("button", {
      type: "button",
      class: "more",
      click: () => {
        block.replaceChildren(outside(text));
        block.classList.add("whole");
        block.tabIndex = 0;
        block.focus({ preventScroll: true });
      },
    }, `Show all ${grouped(text.length)} characters`);
    block.append(outside(`${cut(text, limit)}…`), button);
    return block;
  }

  /** The start of a text of others, where a name or a word is expected. */
  function brief(text, limit) {
    return outside(text.length > limit ? `${cut(text, limit)}…` : text);
  }

  /** `list` with what `draw(one, place)` makes of the first `limit`; a button brings the others. */
  function many(list, all, limit, draw) {
    list.append(...all.slice(0, limit).map(draw));
    if (all.length <= limit) return list;
    const button = el("button", {
      type: "button",
      class: "more",
      click: () => {
        const from = list.children.length;
        list.append(...all.slice(from, from + limit).map((one, i) => draw(one, from + i)));
        if (list.children.length === all.length) button.remove();
        else button.textContent = rest();
      },
    });
    const rest = () => `Show more of ${grouped(all.length)}`;
    button.textContent = rest();
    return el("div", {}, list, button);
  }

  /** A link if the address is http(s), else the address as text. */
  function link(address, text = null) {
    let url = null;
    try {
      url = new URL(address);
    } catch {
      // no address: shown as it is
    }
    if (!url || !/^https?:$/.test(url.protocol) || url.username || url.password) {
      return el("span", { class: "no-link" }, outside(address.slice(0, 300)));
    }
    const node = el("a", { class: "link" });
    node.href = url.href;
    node.target = "_blank";
    node.rel = "noopener noreferrer";
    node.referrerPolicy = "no-referrer";
    node.append(text === null ? outside(shortAddress(url)) : outside(text));
    return node;
  }

  /** Host in ASCII and the path's start: what a reader needs to judge a link by. */
  function shortAddress(url) {
    const path = url.pathname === "/" ? "" : url.pathname;
    const whole = url.host + path;
    return whole.length > 60 ? `${whole.slice(0, 59)}…` : whole;
  }

  svrlViewer.pictureAddress = (name, size) => `pictures/${name}_${size}.webp`;

  /** A picture of the page, or what it stands for: a stated placeholder. */
  function picture(reference, size, alt) {
    if (!reference) return el("span", { class: `no-picture ${size}` }, "no picture");
    if (reference.problem || !/^[0-9a-f]{32}$/.test(reference.name)) {
      const cause = reference.problem || "its name is not one of ours";
      return el("span", { class: `no-picture broken ${size}`, title: spelled(cause) },
        size === "small" ? "broken picture" : outside(`This picture cannot be shown: ${cause}`));
    }
    const image = el("img", { class: `picture ${size}` });
    image.alt = alt;
    image.loading = "lazy";
    image.decoding = "async";
    image.width = reference.width;
    image.height = reference.height;
    image.addEventListener("error", () =>
      image.replaceWith(el("span", { class: `no-picture broken ${size}` }, "picture file missing")));
    image.src = svrlViewer.pictureAddress(reference.name, size);
    return image;
  }

  const number = (value, digits = 2) => (value === null || value === undefined ? "–" : value.toFixed(digits));
  const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}%`);
  // Digits in threes. The browser's own way loads its tables of languages first, which is felt.
  const grouped = (count) => String(count).replace(/\B(?=(?:\d{3})+$)/g, ",");
  const plural = (count, one, many = `${one}s`) => `${grouped(count)} ${count === 1 ? one : many}`;

  Object.assign(svrlViewer, { el, icon, outside, spelled, cut, brief, many, passage, link, picture, number, percent, grouped, plural });
})();
