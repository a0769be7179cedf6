"""Data files -> (entity, relation) items with golds and evidence, each checked against the corpus.

Relations of a flag's place: its name, capital, region, the neighbour in each of four directions,
the colour at the top and at the bottom of the flag. Relation of an object: its name. A fact is kept
only if its answer stands in the place's own summary, so that the corpus can answer it; a colour
only if one colour clearly fills that part of the clean picture.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import unicodedata

import numpy as np

from svrl_jax.data import pictures, sources

DIRECTIONS = ("north", "south", "east", "west")
COLOURS = {
    "red": (206, 44, 44),
    "blue": (30, 80, 160),
    "light blue": (97, 178, 228),
    "green": (92, 158, 49),
    "yellow": (252, 234, 43),
    "orange": (241, 179, 28),
    "white": (255, 255, 255),
    "black": (0, 0, 0),
}
# Parts of a clean flag, as shares of its width and height: left, top, right, bottom.
_PARTS = {"top": (0.42, 0.06, 0.62, 0.18), "bottom": (0.42, 0.82, 0.62, 0.94)}
_COLOUR_PURITY = 0.85
# Colours that people name either way.
_COLOUR_NAMES = {
    "orange": ("yellow", "orange"),
    "yellow": ("yellow", "orange"),
    "light blue": ("light blue", "blue"),
}

QUESTIONS = {
    "name": (
        "Which place has this flag?",
        "Whose flag is this?",
        "Name the place with this flag.",
    ),
    "capital": (
        "What is the capital of this place?",
        "Name the capital of the place with this flag.",
        "Which city is the capital here?",
    ),
    "region": (
        "In which region is this place?",
        "Which part of the world is this place in?",
        "Name the region of the place with this flag.",
    ),
    "top": ("What colour is the top of this flag?", "Name the colour at the top."),
    "bottom": ("What colour is the bottom of this flag?", "Name the colour at the bottom."),
    "object": ("What is shown here?", "What is this object?", "Name the thing in the picture."),
    **{
        d: (
            f"What lies to the {d} of this place?",
            f"Name the neighbour to the {d} of this place.",
            f"This place has which neighbour to the {d}?",
        )
        for d in DIRECTIONS
    },
}
# Relations that the picture alone answers, without knowing any name.
VISUAL = ("top", "bottom")
NAMING = ("name", "object")
FACTS = ("capital", "region", *DIRECTIONS)


@dataclasses.dataclass(frozen=True)
class Entity:
    """What a picture shows: a place by its flag, or an object.

    Attributes:
      title: its article's title, also the document id.
      code: OpenMoji code of its picture.
      names: title first, then other names.
      is_flag: a flag fills the canvas.
    """

    title: str
    code: str
    names: tuple[str, ...]
    is_flag: bool


@dataclasses.dataclass(frozen=True)
class Item:
    """One distinct (entity, relation) question: `golds` truth first; `evidence_ids` document
    ids.
    """

    entity: Entity
    relation: str
    golds: tuple[str, ...]
    evidence_ids: tuple[str, ...]

    @property
    def id(self) -> str:
        """Stable id, such as `Bhutan/capital`."""
        return f"{self.entity.title}/{self.relation}"


@functools.cache
def entities() -> tuple[Entity, ...]:
    """Every flag's place and every object that has a summary, ordered by title."""
    by_lower = {t.lower(): t for t in sources.documents_by_title()}
    flags, found = sources.flag_codes(), {}
    for row in sources.countries():
        iso = (row.get("ISO") or {}).get("alpha2")
        names = [row["name"], *(n for n in row.get("altSpellings", []) if len(n) > 3)]
        title = next((by_lower[n.lower()] for n in names if n.lower() in by_lower), None)
        if iso in flags and title and title not in found:
            found[title] = Entity(title, flags[iso], _with_ascii([title, *names]), is_flag=True)
    for title, code in sources.object_codes().items():
        if title not in found:
            found[title] = Entity(title, code, _with_ascii([title]), is_flag=False)
    return tuple(found[t] for t in sorted(found))


@functools.cache
def items() -> tuple[Item, ...]:
    """Every item that its evidence can answer, ordered by id; ids are unique."""
    facts = {(r.get("ISO") or {}).get("alpha2"): r for r in sources.countries()}
    iso_of = {code: iso for iso, code in sources.flag_codes().items()}
    found: list[Item] = []
    for entity in entities():
        document = sources.documents_by_title()[entity.title]
        own = (entity.title,)
        if not entity.is_flag:
            found.append(Item(entity, "object", entity.names, own))
            continue
        found.append(Item(entity, "name", entity.names, own))
        row = facts[iso_of[entity.code]]
        golds = {"capital": _capital(row, document, entity), "region": _region(document)}
        golds |= {d: _neighbours(document.text, d) for d in DIRECTIONS}
        found += [Item(entity, r, g, own) for r, g in golds.items() if g]
        for part in VISUAL:
            colour = part_colour(entity.code, part)
            if colour:
                found.append(Item(entity, part, colour_golds(colour), ()))
    for item in found:
        check_item(item)
    return tuple(sorted(found, key=lambda i: i.id))


def check_item(item: Item) -> None:
    """Raises ValueError unless the item's evidence holds one of its golds."""
    if not item.golds or not all(g.strip() for g in item.golds):
        raise ValueError(f"item {item.id!r} has an empty gold")
    if item.relation in VISUAL:
        if part_colour(item.entity.code, item.relation) not in item.golds:
            raise ValueError(f"item {item.id!r}: the picture does not show {item.golds[0]!r}")
        return
    texts = [sources.documents_by_title()[i] for i in item.evidence_ids]
    if not any(_holds(f"{d.title}. {d.text}", g) for d in texts for g in item.golds):
        raise ValueError(f"item {item.id!r}: no evidence document holds {item.golds[0]!r}")


def part_colour(code: str, part: str) -> str | None:
    """The colour that fills at least 85% of a part of the clean flag, or None."""
    picture = pictures.clean_picture(code, 84, 56, is_flag=True)
    return colour_at(picture, part, max_distance=np.inf)


def colour_at(picture: np.ndarray, part: str, max_distance: float) -> str | None:
    """The colour that fills at least 85% of a part of a picture, or None.

    Args:
      picture: uint8[H, W, 3].
      part: `top` or `bottom`.
      max_distance: of a pixel from its nearest named colour, in grey levels (Euclidean over the
        channels); farther ones have no name.
    """
    height, width = picture.shape[:2]
    left, top, right, bottom = _PARTS[part]
    region = picture[
        round(top * height) : round(bottom * height), round(left * width) : round(right * width)
    ].reshape(-1, 3)
    table = np.asarray(list(COLOURS.values()), np.float32)
    distances = np.sqrt(((region.astype(np.float32)[:, None] - table) ** 2).sum(-1))
    nearest = np.argmin(distances, axis=1)[distances.min(axis=1) <= max_distance]
    counts = np.bincount(nearest, minlength=len(table)) / len(region)
    best = int(np.argmax(counts))
    return list(COLOURS)[best] if counts[best] >= _COLOUR_PURITY else None


def colour_golds(colour: str) -> tuple[str, ...]:
    """The answers that name a colour, the usual name first."""
    return _COLOUR_NAMES.get(colour, (colour,))


def _capital(row: dict, document: sources.Document, entity: Entity) -> tuple[str, ...]:
    capitals = row.get("capital") or []  # some places name several
    capitals = [capitals] if isinstance(capitals, str) else capitals
    capitals = [c for c in capitals if c not in entity.names and _holds(document.text, c)]
    return _with_ascii(capitals)


def _region(document: sources.Document) -> tuple[str, ...]:
    match = re.search(r"\bin (?:the )?([A-Z][\w -]+)$", document.description)
    if not match or not _holds(document.text, match.group(1)):
        return ()
    return _with_ascii([match.group(1)])


_NAME = r"[A-Z][\w'-]+(?: (?:of|and the|the|[A-Z][\w'-]+))*"


def _neighbours(text: str, direction: str) -> tuple[str, ...]:
    """Names said to lie in a direction; () unless the text says it in exactly one place."""
    pattern = rf"((?:{_NAME}, )*(?:{_NAME},? and )?(?:the )?){_NAME} to (?:the|its) {direction}\b"
    found = list(re.finditer(pattern, text))
    if len(found) != 1:
        return ()
    whole = found[0].group(0)
    last = re.search(rf"({_NAME}) to (?:the|its) {direction}$", whole)
    names = [last.group(1)] if last else []
    lead = re.search(
        rf"({_NAME}),? and (?:the )?{re.escape(names[0])} to" if names else "$^", whole
    )
    if lead:
        names.append(lead.group(1))
    names = [re.sub(r"^(The|And|It) ", "", n) for n in names]
    return _with_ascii([n for n in names if 3 < len(n) < 30 and " and the " not in n])


def _holds(text: str, gold: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(gold.lower())}(?!\w)", text.lower()) is not None


def _with_ascii(names: list[str]) -> tuple[str, ...]:
    """Each name once, its spelling without accents behind it."""
    out: list[str] = []
    for name in names:
        plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
        out += [n for n in (name, plain) if n.strip() and n not in out]
    return tuple(dict.fromkeys(out))
