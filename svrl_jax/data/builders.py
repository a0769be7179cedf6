"""Tasks of published rows -> a tfds data set in ArrayRecord, encoded pictures as they came.

Only `prepare` imports this module, as tensorflow-datasets is an extra. No TensorFlow is imported.
tfds's own writer holds a gigabyte in memory and then sorts temporary files through TensorFlow's
file system, so `_download_and_prepare` is ours: rows go straight into shards, in published order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import tensorflow_datasets as tfds
from array_record.python import array_record_module
from tensorflow_datasets.core import example_serializer

from svrl_jax.data import datasets
from svrl_jax.types import Task

VERSION = "1.0.0"
SHARD_BYTES = 256 << 20  # of a shard, about


class Reading(Protocol):
    """What a builder asks of its source; `prepare.Reading` is one."""

    splits: tuple[str, ...]

    def tasks(self, split: str) -> Iterator[tuple[Task, int, int]]:
        """(task, picture width, picture height) of every readable row, in order."""


class TaskBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Writes tasks; a data set is a subclass that says its name."""

    VERSION = tfds.core.Version(VERSION)
    RELEASE_NOTES = {"1.0.0": "First."}

    def __init__(self, *, reading: Reading | None = None, **kwargs: Any):
        """Args: reading: the source; only reading an already built data set works without."""
        self._reading = reading
        super().__init__(file_format="array_record", **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        about = datasets.DATASETS[self.name]
        return tfds.core.DatasetInfo(
            builder=self,
            description=about.about,
            features=features(),
            license=about.licence,
            homepage=f"https://huggingface.co/datasets/{about.hub_id}" if about.hub_id else None,
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager) -> dict[str, Iterator]:
        return {split: self._generate_examples(split) for split in self._reading.splits}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, (task, width, height) in enumerate(self._reading.tasks(split)):
            yield number, to_example(task, width, height)

    def _download_and_prepare(self, dl_manager, download_config=None) -> None:
        serializer = example_serializer.ExampleSerializer(self.info.features.get_serialized_info())
        infos = []
        for split, examples in self._split_generators(dl_manager).items():
            template = self._get_filename_template(split_name=split)
            lengths, num_bytes = _write_shards(
                (
                    serializer.serialize_example(self.info.features.encode_example(example))
                    for _, example in examples
                ),
                template,
            )
            infos.append(
                tfds.core.SplitInfo(
                    name=split,
                    shard_lengths=lengths,
                    num_bytes=num_bytes,
                    filename_template=template,
                )
            )
        self.info.set_splits(tfds.core.splits.SplitDict(infos))

    def _log_download_bytes(self) -> None:
        """Nothing is downloaded here, so nothing is said."""

    def _log_download_done(self) -> None:
        """The caller says what was built."""


class Fvqa(TaskBuilder):
    """See datasets.DATASETS."""

    name = "fvqa"


class Infoseek(TaskBuilder):
    """See datasets.DATASETS."""

    name = "infoseek"


class InfoseekOriginal(TaskBuilder):
    """See datasets.DATASETS."""

    name = "infoseek_original"


class Mmsearch(TaskBuilder):
    """See datasets.DATASETS."""

    name = "mmsearch"


class Livevqa(TaskBuilder):
    """See datasets.DATASETS."""

    name = "livevqa"


class LivevqaPreview(TaskBuilder):
    """See datasets.DATASETS."""

    name = "livevqa_preview"


class Simplevqa(TaskBuilder):
    """See datasets.DATASETS."""

    name = "simplevqa"


class Table(TaskBuilder):
    """See datasets.DATASETS."""

    name = "table"


BUILDERS: Mapping[str, type[TaskBuilder]] = {
    cls.name: cls
    for cls in (
        Fvqa, Infoseek, InfoseekOriginal, Mmsearch, Livevqa, LivevqaPreview, Simplevqa, Table,
    )
}  # fmt: skip


def features() -> tfds.features.FeaturesDict:
    """The stored form of a Task, and the size of its picture in pixels (0 without one)."""
    text, texts = tfds.features.Text(), tfds.features.Sequence(tfds.features.Text())
    return tfds.features.FeaturesDict(
        {
            "id": text,
            "question": text,
            # Encoded bytes: the Image feature would want TensorFlow.
            "picture": tfds.features.Tensor(shape=(), dtype=np.object_),
            "width_px": tfds.features.Scalar(np.int32),
            "height_px": tfds.features.Scalar(np.int32),
            "golds": texts,
            "category": text,
            "entity": texts,
            "evidence_ids": texts,
            "picture_url": text,
        }
    )


def to_example(task: Task, width_px: int, height_px: int) -> dict[str, Any]:
    """A task as `features` stores it; the source is the data set's and split's name."""
    return {
        "id": task.id,
        "question": task.question,
        "picture": task.picture,
        "width_px": width_px,
        "height_px": height_px,
        "golds": list(task.golds),
        "category": task.category,
        "entity": list(task.entity),
        "evidence_ids": list(task.evidence_ids),
        "picture_url": task.picture_url or "",
    }


def _write_shards(records: Iterator[bytes], template) -> tuple[list[int], int]:
    """Writes records in order; returns the rows of each shard and all bytes."""
    lengths, total, paths = [], 0, []
    writer, room = None, 0
    for record in records:
        if writer is None or room <= 0:
            if writer is not None:
                writer.close()
            paths.append(template.data_dir / f"{template.split}.shard{len(paths):05d}")
            # One record a group: rows are read one by one in any order.
            writer = array_record_module.ArrayRecordWriter(os.fspath(paths[-1]), "group_size:1")
            lengths.append(0)
            room = SHARD_BYTES
        writer.write(record)
        lengths[-1] += 1
        room -= len(record)
        total += len(record)
    if writer is not None:
        writer.close()
    for index, path in enumerate(paths):  # only now is their number known
        path.rename(template.sharded_filepath(shard_index=index, num_shards=len(paths)))
    return lengths, total
