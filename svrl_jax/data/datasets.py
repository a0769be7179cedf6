"""The data sets as published: which files, how many rows, whose licence, and row -> Task.

Sources: MMSearch-R1 (EvolvingLMMs-Lab/multimodal-search-r1) for FVQA and the InfoSeek subset;
open-vision-language/infoseek and edchengg/infoseek_eval; arXiv:2409.12959 (MMSearch); LIVEVQA
(fumingyang2004/LIVEVQA, arXiv:2504.05288); arXiv:2502.13059 (SimpleVQA).
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from svrl_jax.data import cells
from svrl_jax.data.cells import RowError
from svrl_jax.types import Task


@dataclasses.dataclass(frozen=True)
class Split:
    """One split.

    Attributes:
      patterns: of its files, relative to the source; the first that matches anything counts.
      num_tasks: tasks that the published files give, None where not known.
      sha256: file name -> published sha256.
      picture_folders: beside the rows' file, where picture paths may start.
      keep: tasks that belong to the split.
      what: `keep` in words, "" where all belong.
    """

    patterns: tuple[str, ...]
    num_tasks: int | None = None
    sha256: Mapping[str, str] = dataclasses.field(default_factory=dict)
    picture_folders: tuple[str, ...] = ()
    keep: Callable[[Task], bool] = lambda task: True
    what: str = ""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a published row stands, and what its file alone does not say.

    Attributes:
      dataset, split: names.
      number: of the row in the split, from 0.
      folders: where picture paths start: the row's file's folder, the split's picture folders in
        it, the source's.
      columns: Task field -> column, for the user's own tables.
      lookup: made once a split by `DataSet.prepare`.
    """

    dataset: str
    split: str
    number: int
    folders: tuple[pathlib.Path, ...]
    columns: Mapping[str, str]
    lookup: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class DataSet:
    """One published data set.

    Attributes:
      splits: by name.
      tasks: (row, place) -> its tasks; none where the row belongs to no split of ours (another
        language). Raises RowError.
      scorer: its own, of rewards.answers.SCORERS.
      licence: as published.
      about: one sentence, with the source.
      hub_id: Hugging Face data set, or None.
      revision: of the hub, pinned where known; None: the newest.
      prepare: files of a split -> `Place.lookup`.
    """

    splits: Mapping[str, Split]
    tasks: Callable[[dict[str, Any], Place], list[Task]]
    scorer: str
    licence: str
    about: str
    hub_id: str | None = None
    revision: str | None = None
    prepare: Callable[[Sequence[pathlib.Path], pathlib.Path], dict] = lambda files, source: {}


def _make(place: Place, *, id: str, **fields: Any) -> Task:
    return Task(id=id, source=f"{place.dataset}/{place.split}", item=id, **fields)


def _fvqa(row: dict[str, Any], place: Place) -> list[Task]:
    """MMSearch-R1's row format: FVQA and the InfoSeek subset share it."""
    rule = row.get("reward_model")
    if not isinstance(rule, Mapping):
        raise RowError("it has no reward_model")
    task = _make(
        place,
        id=row.get("data_id") or f"{place.dataset}_{place.split}_{place.number}",
        question=cells.question(row.get("prompt")),
        picture=cells.picture_bytes(row.get("images"), place.folders),
        golds=cells.answers(rule.get("ground_truth"), rule.get("candidate_answers")),
        category=cells.text_or_empty(row.get("category")),
        picture_url=cells.text_or_empty(row.get("image_urls")) or None,
    )
    return [task]


def _infoseek_original(row: dict[str, Any], place: Place) -> list[Task]:
    """InfoSeek's own files. A numerical row's last gold is its accepted range, `[low, high]`."""
    data_id, image_id = row.get("data_id"), row.get("image_id")
    picture = place.lookup["pictures"].get(image_id)
    if picture is None:
        raise RowError(f"its picture {image_id} is not below the source")
    task = _make(
        place,
        id=data_id or f"{place.dataset}_{place.split}_{place.number}",
        question=cells.question(row.get("question")),
        picture=picture.read_bytes(),
        golds=_infoseek_golds(row, place.lookup["types"].get(data_id, "").lower()),
        category=cells.text_or_empty(row.get("data_split")) or place.split,
        evidence_ids=tuple(cells.texts(row.get("entity_id"))),
    )
    return [task]


def _infoseek_golds(row: dict[str, Any], question_type: str) -> tuple[str, ...]:
    accepted = row.get("answer_eval")
    first = accepted[0] if isinstance(accepted, list) and accepted else accepted
    is_range = isinstance(first, Mapping)
    if question_type == "numerical" and not is_range:  # the official tolerance of a bare number
        try:
            value = float(first)
        except (TypeError, ValueError) as error:
            raise RowError("its numerical answer is no number") from error
        first, is_range = {"range": sorted((0.9 * value, 1.1 * value))}, True
    if not is_range:
        return cells.answers(row.get("answer"), accepted)
    try:
        low, high = (float(v) for v in first["range"][:2])
    except (KeyError, TypeError, ValueError) as error:
        raise RowError("its numerical answer has no range") from error
    truth = first.get("wikidata", row.get("answer"))
    return (*cells.answers(truth), f"[{low!r}, {high!r}]")


def _infoseek_lookup(files: Sequence[pathlib.Path], source: pathlib.Path) -> dict[str, Any]:
    types = {}
    for file in files:
        path = file.with_name(f"{file.stem}_qtype.jsonl")
        if path.is_file():
            with path.open(encoding="utf-8") as lines:
                for line in filter(str.strip, lines):
                    row = json.loads(line)
                    types[row["data_id"]] = row["question_type"]
    pictures = {
        path.stem: path
        for path in sorted(source.rglob("oven_*"))
        if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp")
    }
    return {"types": types, "pictures": pictures}


def _mmsearch(row: dict[str, Any], place: Place) -> list[Task]:
    parts = (cells.text_or_empty(row.get(name)) for name in ("area", "subfield"))
    task = _make(
        place,
        id=f"mmsearch_{row['sample_id']}",
        question=cells.question(row.get("query")),
        picture=cells.picture_bytes(row.get("query_image"), place.folders),
        golds=cells.answers(row.get("gt_answer"), row.get("alternative_gt_answers")),
        category="/".join(part for part in parts if part),
    )
    return [task]


def _livevqa(row: dict[str, Any], place: Place) -> list[Task]:
    """A row of benchmark.json: a question about the picture and one that needs knowledge beyond."""
    tasks = []
    for level in ("level1_qa", "level2_qa"):
        qa = row.get(level)
        if not isinstance(qa, Mapping):
            raise RowError(f"it has no {level}")
        picture = cells.picture_bytes(qa.get("img_path") or row.get("img_path"), place.folders)
        tasks.append(
            _make(
                place,
                id=f"livevqa_{place.split}_{row['id']}_{level[:6]}",
                question=cells.question(qa.get("question")),
                picture=picture,
                golds=cells.answers(_chosen_option(qa), qa.get("Ground_Truth_List")),
                category=f"{level[:6]}/{cells.text_or_empty(qa.get('question_type'))}",
                picture_url=cells.text_or_empty(qa.get("img_url")) or None,
            )
        )
    return tasks


def _chosen_option(qa: Mapping[str, Any]) -> str | None:
    """Text of the option that the truth's letter names; None where there is none."""
    letter = cells.text_or_empty(qa.get("Ground_Truth"))
    for option in qa.get("options") or ():
        head, _, text = str(option).partition(".")
        if letter and head.strip() == letter:
            return text
    return None


def _simplevqa(row: dict[str, Any], place: Place) -> list[Task]:
    """English rows only, as published figures have it; the Chinese ones are skipped."""
    if row.get("language") != "EN":
        return []
    task = _make(
        place,
        id=f"simplevqa_{row['data_id']}",
        question=cells.question(row.get("question")),
        picture=cells.picture_bytes(row.get("image"), place.folders),
        golds=cells.answers(row.get("answer")),
        category=cells.text_or_empty(row.get("vqa_category")),
    )
    return [task]


# Task field -> what a user's own table calls it when --columns says nothing.
TABLE_COLUMNS = {
    "id": "id", "question": "question", "picture": "image", "answer": "answer",
    "aliases": "aliases", "category": "category", "picture_url": "image_url", "entity": "entity",
    "evidence_ids": "evidence_ids",
}  # fmt: skip


def _table(row: dict[str, Any], place: Place) -> list[Task]:
    """A row of the user's own table, its columns named by `Place.columns`."""
    cell = {field: row.get(column) for field, column in place.columns.items()}
    task = _make(
        place,
        id=cells.text_or_empty(cell["id"]) or f"{place.dataset}_{place.split}_{place.number}",
        question=cells.question(cell["question"]),
        picture=cells.picture_bytes(cell["picture"], place.folders),
        golds=cells.answers(cell["answer"], cell["aliases"]),
        category=cells.text_or_empty(cell["category"]),
        picture_url=cells.text_or_empty(cell["picture_url"]) or None,
        entity=tuple(cells.texts(cell["entity"])),
        evidence_ids=tuple(cells.texts(cell["evidence_ids"])),
    )
    return [task]


def _has_picture(task: Task) -> bool:
    return bool(task.picture)


_END2END = ("end2end.parquet", "end2end/*.parquet", "data/end2end*.parquet", "end2end*.parquet")

DATASETS: dict[str, DataSet] = {
    "fvqa": DataSet(
        splits={
            "train": Split(
                ("fvqa_train*.parquet", "data/train-*.parquet"),
                4856,
                {
                    "fvqa_train.parquet": "d23be97f4493846381f71c6953a297"
                    "77fe1522aaf37942a26393605ffd78171f"
                },
            ),
            "test": Split(("fvqa_test*.parquet", "data/test-*.parquet"), 1800),
        },
        tasks=_fvqa,
        scorer="em_published",
        licence="Apache-2.0",
        about="FactualVQA of MMSearch-R1 (lmms-lab/FVQA, arXiv:2506.20670).",
        hub_id="lmms-lab/FVQA",
        revision="bb4a4ff4c9c3fd0382d11f5d7fccd66d0b8428b5",
    ),
    "infoseek": DataSet(
        splits={
            "test": Split(
                ("*infoseek*.parquet", "**/*infoseek*.parquet"),
                2000,
                {
                    "mmsearch_r1_infoseek_sub_2k.parquet": "8d5a0f9e8e6c27dcaca88ace69ea65d2"
                    "8df814d010661126a76c3388ce2e60b4"
                },
            )
        },
        tasks=_fvqa,
        scorer="em_published",
        licence="Apache-2.0",
        about="MMSearch-R1's random 2,000 rows of InfoSeek's test split, judged by aliases.",
    ),
    "infoseek_original": DataSet(
        splits={
            "train": Split(("infoseek_train.jsonl",)),
            "val": Split(("infoseek_val.jsonl",)),
        },
        tasks=_infoseek_original,
        scorer="infoseek",
        licence="Apache-2.0",
        about="InfoSeek (open-vision-language/infoseek, arXiv:2302.11713), pictures from OVEN.",
        prepare=_infoseek_lookup,
    ),
    "mmsearch": DataSet(
        splits={
            "end2end": Split(_END2END, 300),
            # 171 is what MMSearch-R1 and SVRL are said to report on; not confirmed.
            "pictures": Split(_END2END, 171, keep=_has_picture, what="has a picture"),
        },
        tasks=_mmsearch,
        scorer="mmsearch_f1",
        licence="not stated: ask the authors before redistributing",
        about="MMSearch, end-to-end task (CaraJ/MMSearch, arXiv:2409.12959).",
        hub_id="CaraJ/MMSearch",
    ),
    "livevqa": DataSet(
        splits={
            # 350, 500 and 342 records of two questions. A second News file lies among the pictures.
            name.lower(): Split(
                (f"{name}/benchmark.json", f"**/{name}/benchmark.json"),
                2 * records,
                picture_folders=(pictures,),
            )
            for name, records, pictures in (
                ("News", 350, "News_imgs"),
                ("Paper", 500, "Paper_images"),
                ("Video", 342, "Video_images"),
            )
        },
        tasks=_livevqa,
        scorer="livevqa",
        licence="MIT (GitHub fumingyang2004/LIVEVQA)",
        about="LiveVQA's benchmark files (arXiv:2504.05288), two questions a picture.",
    ),
    "livevqa_preview": DataSet(
        splits={"test": Split(("**/*.parquet", "**/*.jsonl", "**/*.json"), 3602)},
        tasks=_table,
        scorer="livevqa",
        licence="see the data set's page",
        about="ONE-Lab/LiveVQA-Research-Preview, which MMSearch-R1 evaluated on; columns by flag.",
        hub_id="ONE-Lab/LiveVQA-Research-Preview",
    ),
    "simplevqa": DataSet(
        splits={"test": Split(("test.parquet", "**/test-*.parquet", "**/test.parquet"), 1013)},
        tasks=_simplevqa,
        scorer="simplevqa",
        licence="Apache-2.0",
        about="SimpleVQA, English rows (m-a-p/SimpleVQA, arXiv:2502.13059).",
        hub_id="m-a-p/SimpleVQA",
    ),
    "table": DataSet(
        splits={
            split: Split((f"{split}*.parquet", f"{split}*.jsonl", f"{split}*.json"))
            for split in ("train", "val", "test")
        },
        tasks=_table,
        scorer="em",
        licence="the user's own",
        about="A table of the user's own.",
    ),
}


def tasks_of(
    dataset: DataSet, split: Split, row: dict[str, Any] | str, place: Place
) -> Iterator[Task]:
    """The split's tasks in a row.

    Raises:
      RowError: with the reason why the row is unreadable.
    """
    if isinstance(row, str):
        raise RowError(row)
    try:
        found = dataset.tasks(row, place)
    except KeyError as error:
        raise RowError(f"it has no {error.args[0]}") from error
    yield from filter(split.keep, found)
