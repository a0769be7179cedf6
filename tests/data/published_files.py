"""Writes small files in the schemas as published (FVQA, InfoSeek, MMSearch, LiveVQA, SimpleVQA)."""

import base64
import io
import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

PUBLISHED = pathlib.Path(__file__).parent / "published"


def picture(width=40, height=30, colour=(200, 30, 30), kind="PNG") -> bytes:
    return _encoded(Image.new("RGB", (width, height), colour), kind)


def encode(pixels: np.ndarray) -> bytes:
    """uint8[H, W, 3] -> JPEG."""
    return _encoded(Image.fromarray(pixels), "JPEG")


def _encoded(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def write_parquet(path: pathlib.Path, rows: list[dict], schema: pa.Schema | None = None):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema), path)
    return path


def write_jsonl(path: pathlib.Path, rows: list[dict]):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def fvqa_row(number: int, *, split="train", images=None, truth="Spain", candidates="[]", **more):
    if images is None:
        images = [{"bytes": picture(), "path": None}]
    rule = {"candidate_answers": candidates, "ground_truth": truth, "style": "rule"}
    row = {
        "data_id": f"fvqa_{split}_{number}",
        "prompt": [{"content": f"Which country is number {number}?", "role": "user"}],
        "images": images,
        "reward_model": rule,
        "data_source": f"mmsearch_r1/fvqa_{split}",
        "image_urls": None,
    }
    if split == "train":  # the test file has no such column
        row["category"] = ("search_free", "search_required")[number % 2]
    return row | more


def infoseek_original(folder: pathlib.Path) -> pathlib.Path:
    """Three kinds of questions, pictures in a folder of their own."""
    rows = [
        ("infoseek_val_00000000", "oven_01", "Who built it?", ["Ann Lee"], ["Ann Lee", "A. Lee"],
         "val_unseen_entity", "String"),
        ("infoseek_val_00000001", "oven_02", "How tall is it?", ["828"],
         [{"wikidata": 828.0, "range": [745.2, 910.8]}], "val_unseen_question", "Numerical"),
        ("infoseek_val_00000002", "oven_03", "When was it built?", ["1930"], ["1929", "1930",
         "1931"], "val_unseen_question", "Time"),
        ("infoseek_val_00000003", "oven_09", "Where is it?", ["Oslo"], ["Oslo"],
         "val_unseen_entity", "String"),
    ]  # fmt: skip
    names = ("data_id", "image_id", "question", "answer", "answer_eval", "data_split")
    write_jsonl(folder / "infoseek_val.jsonl", [dict(zip(names, r[:6], strict=True)) for r in rows])
    types = [{"data_id": r[0], "question_type": r[6]} for r in rows]
    write_jsonl(folder / "infoseek_val_qtype.jsonl", types)
    (folder / "oven_images" / "01").mkdir(parents=True)
    for name in ("oven_01.JPEG", "oven_02.jpg", "oven_03.jpg"):
        (folder / "oven_images" / "01" / name).write_bytes(picture(kind="JPEG"))
    return folder


def mmsearch(folder: pathlib.Path) -> pathlib.Path:
    shot = {"bytes": picture(64, 64), "path": "shot.png"}
    rows = [
        {"sample_id": "news_1", "query": "Who won?", "query_image": None,
         "image_search_result": None, "area": "news", "subfield": "sport",
         "timestamp": "2024-05-01", "gt_requery": "winner", "gt_answer": "Coco Gauff",
         "alternative_gt_answers": ["Gauff"]},
        {"sample_id": "knowledge_1", "query": "What is this?", "query_image": shot,
         "image_search_result": shot, "area": "knowledge", "subfield": "art",
         "timestamp": "", "gt_requery": "", "gt_answer": "The Scream",
         "alternative_gt_answers": []},
    ]  # fmt: skip
    write_parquet(folder / "end2end" / "end2end-00000-of-00001.parquet", rows)
    return folder


def livevqa(folder: pathlib.Path) -> pathlib.Path:
    def qa(question, kind, letter, accepted):
        return {"question": question, "question_type": kind, "options": ["A. Oslo", "B. New York"],
                "Ground_Truth": letter, "Ground_Truth_List": accepted,
                "img_path": "cnn_1.jpg", "img_url": "https://example.org/1.jpg"}  # fmt: skip

    row = {
        "id": "0_7", "img_path": "cnn_1.jpg", "source": "CNN World", "time": "2025-04-01",
        "level1_qa": qa("Which city is it?", "location", "B", ["New York", "NYC"]),
        "level2_qa": qa("Who governs it?", "person", "", ["The mayor"]),
    }  # fmt: skip
    pictures = folder / "liveVQA_benchmarks" / "News" / "News_imgs"
    pictures.mkdir(parents=True)
    (pictures / "cnn_1.jpg").write_bytes(picture(kind="JPEG"))
    for place in (pictures.parent, pictures):  # the repository holds a second copy
        (place / "benchmark.json").write_text(json.dumps([row]), "utf-8")
    return folder


def simplevqa(folder: pathlib.Path) -> pathlib.Path:
    def row(number, language, image):
        return {"data_id": number, "image": image, "image_description": "", "language": language,
                "question": "What is it?", "answer": "Heron", "original_category": "",
                "source": "s", "atomic_question": "", "atomic_fact": "",
                "vqa_category": "object"}  # fmt: skip

    encoded = base64.b64encode(picture(kind="JPEG")).decode()
    rows = [row(3, "CN", encoded), row(1012, "EN", encoded), row(1013, "EN", "@@" * 60)]
    write_parquet(folder / "test.parquet", rows)
    write_parquet(folder / "test_200.parquet", rows)  # beside it on the hub, not the benchmark
    return folder
