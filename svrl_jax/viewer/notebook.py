"""An Episode -> the viewer's drawing of it as one HTML string, for a notebook's output.

The string is a sandboxed frame: it has no access to the notebook around it, its policy allows our
script and style by their hashes and nothing else, and what came from outside is JSON that the
script puts into text nodes.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import importlib.resources
import os

from svrl_jax.processing.tokenizer import Tokenizer
from svrl_jax.records import Record
from svrl_jax.types import Episode, OracleLabels, Score, Task
from svrl_jax.viewer.build import page_files, to_json
from svrl_jax.viewer.entries import Notes, make_entry
from svrl_jax.viewer.pictures import InlinePictures
from svrl_jax.viewer.tokens import Vocabulary, token_view

SCRIPTS = ("data.js", "text.js", "episode.js", "tokens.js")
STYLES = ("style.css", "episode.css")


@dataclasses.dataclass(frozen=True)
class Shown:
    """What a notebook displays.

    Attributes:
      document: a whole HTML page.
      height_px: of the frame.
      summary: one line, for where HTML is not shown.
    """

    document: str
    height_px: int
    summary: str

    def _repr_html_(self) -> str:
        return (
            '<iframe sandbox="allow-scripts allow-popups allow-popups-to-escape-sandbox" '
            f'width="100%" height="{self.height_px}" frameborder="0" title="Episode" '
            f'srcdoc="{html.escape(self.document, quote=True)}"></iframe>'
        )

    def __repr__(self) -> str:
        return self.summary


def show(
    episode: Episode | Record,
    *,
    task: Task | None = None,
    score: Score | None = None,
    labels: OracleLabels | None = None,
    tokenizer: Tokenizer | str | os.PathLike | None = None,
    scorer: str = "em",
    height_px: int = 720,
) -> Shown:
    """Draws an episode inline, as `view` does on its page.

    Args:
      episode: an Episode, or a Record of `read_records`, which brings its task and score.
      task, score: of an Episode; without a task there is no question and no verdict.
      labels: of `annotate`, where the score has none.
      tokenizer: spells the tokens; a Tokenizer or a folder with a tokenizer.json. None shows ids.
      scorer: of the answer where there is no score.
      height_px: of the frame; longer episodes scroll.
    Raises:
      TypeError: neither an Episode nor a Record, or a task or score beside a Record.
      ValueError: labels of another episode, or an unknown scorer.
    """
    if isinstance(episode, Record):
        if task is not None or score is not None:
            raise TypeError("a Record brings its own task and score: give an Episode, or no task")
        record = episode
    elif isinstance(episode, Episode):
        record = Record(episode, task, score)
    else:
        raise TypeError(f"show takes an Episode or a Record, got {type(episode).__name__}")
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer.from_folder(tokenizer)
    pictures = InlinePictures()
    entry = make_entry(record, Notes(labels), scorer, pictures)
    data = {
        "view": entry.view,
        "task": entry.task,
        "tokens": token_view(record, Vocabulary(tokenizer)),
        "pictures": {name: _data_address(file) for name, file in pictures.files.items()},
    }
    found = record.episode
    summary = f"Episode of {found.policy} on {found.task_id}: {found.end_reason}, {found.answer!r}"
    return Shown(_document(to_json(data)), height_px, summary)


def _document(data: str) -> str:
    files = page_files()
    style = "\n".join(files[name].decode() for name in STYLES)
    own = importlib.resources.files("svrl_jax.viewer") / "notebook.js"
    script = "\n".join([*(files[name].decode() for name in SCRIPTS), own.read_text("utf-8")])
    policy = (
        f"default-src 'none'; script-src {_hash_source(script)}; style-src {_hash_source(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types svrl-chunks"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="referrer" content="no-referrer"><title>Episode</title>'
        f"<style>{style}</style></head>"
        f'<body class="inline"><script type="application/json" id="data">{data}</script>'
        f"<script>{script}</script></body></html>"
    )


def _hash_source(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _data_address(file: bytes) -> str:
    return f"data:image/webp;base64,{base64.b64encode(file).decode()}"
