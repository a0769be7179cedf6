import io
import json
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from svrl_jax.processing.images import (
    PROCESSOR_CLASSES,
    ImageProcessor,
    PictureError,
    load_picture,
    smart_resize,
)

RELEASE = (3136, 12_845_056)
CLASS_DEFAULT = (3136, 28 * 28 * 1280)


def picture(height, width, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def encoded(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize(
    ("size", "bounds", "expected"),
    [
        ((225, 225), RELEASE, (224, 224)),
        ((180, 320), RELEASE, (168, 308)),
        ((70, 70), RELEASE, (56, 56)),  # 2.5 tiles: to the even number
        ((42, 70), RELEASE, (56, 56)),
        ((98, 98), RELEASE, (112, 112)),
        ((14, 14), RELEASE, (56, 56)),
        ((1, 199), RELEASE, (28, 812)),
        ((4000, 6000), RELEASE, (2912, 4368)),
        ((3600, 3600), RELEASE, (3584, 3584)),
        ((4000, 6000), CLASS_DEFAULT, (812, 1204)),
        ((3600, 3600), CLASS_DEFAULT, (980, 980)),
        pytest.param((639, 31), (1, 20 * 784), (560, 28), marks=pytest.mark.case("A-M1")),
        pytest.param((5600, 28), (1, 20 * 784), (1764, 28), marks=pytest.mark.case("A-M1")),
    ],
)
def test_resized_sides(size, bounds, expected):
    assert smart_resize(*size, 28, *bounds) == expected


def test_a_picture_too_narrow_is_an_error():
    with pytest.raises(PictureError, match=r"ratio 200\.1"):
        smart_resize(10, 2001, 28, *RELEASE)


@pytest.mark.case("A-M1")
def test_a_narrow_picture_keeps_one_tile_and_its_tokens_match():
    processor = ImageProcessor(max_pixels=20 * 784)
    pixels, grids = processor([Image.new("RGB", (31, 639), "white")])
    assert grids.tolist() == [[1, 40, 2]]
    assert len(pixels) == 4 * 20


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"min_pixels": 3136, "max_pixels": 4704},
        {
            "min_pixels": 256 * 256,
            "max_pixels": 16_777_216,
            "patch_size": 16,
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
        },
    ],
)
def test_equals_the_reference_processor_to_the_bit(settings, tmp_path):
    ours = ImageProcessor(**settings)
    ours.save(tmp_path)
    reference = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    pictures = [picture(56, 84), picture(225, 180, 1), picture(100, 31, 2)]
    expected = reference(images=pictures, return_tensors="np")
    pixels, grids = ours(pictures)
    assert pixels.dtype == np.float32 and grids.dtype == np.int32
    assert np.array_equal(grids, expected["image_grid_thw"])
    assert np.array_equal(pixels, expected["pixel_values"])


def test_settings_survive_every_file_layout(tmp_path):
    ours = ImageProcessor(min_pixels=6272, max_pixels=50176)
    ours.save(tmp_path)
    assert ImageProcessor.from_folder(tmp_path) == ours
    Qwen2VLImageProcessorPil.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert ImageProcessor.from_folder(tmp_path) == ours
    (tmp_path / "preprocessor_config.json").unlink()
    wrapped = {"image_processor": ours.to_hf(), "processor_class": "Qwen2_5_VLProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(wrapped))
    assert ImageProcessor.from_folder(tmp_path) == ours
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(FileNotFoundError, match="preprocessor_config"):
        ImageProcessor.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("file", "bounds"),
    [
        ({}, (3136, 1_003_520)),
        ({"size": {"shortest_edge": 784, "longest_edge": 7840}}, (784, 7840)),
        ({"min_pixels": 784}, (784, 1_003_520)),
        ({"size": {"shortest_edge": 1, "longest_edge": 7840}, "min_pixels": 784}, (784, 7840)),
        ({"size": None, "max_pixels": 7840, "resample": 3}, (3136, 7840)),
    ],
)
def test_bounds_are_read_as_transformers_reads_them(file, bounds, tmp_path):
    ours = ImageProcessor.from_hf(file)
    assert (ours.min_pixels, ours.max_pixels) == bounds
    theirs = Qwen2VLImageProcessorPil(**file)
    assert (theirs.size["shortest_edge"], theirs.size["longest_edge"]) == bounds


@pytest.mark.parametrize(
    ("file", "match"),
    [
        ({"do_resize": False}, "do_resize"),
        ({"resample": 2}, "resample is 2"),
        ({"rescale_factor": 1.0}, "rescale_factor"),
        ({"size": {"height": 224, "width": 224}}, "shortest_edge"),
    ],
)
def test_settings_of_other_processors_are_an_error(file, match):
    with pytest.raises(ValueError, match=match):
        ImageProcessor.from_hf(file)


@pytest.mark.parametrize("family", PROCESSOR_CLASSES)
def test_the_saved_file_names_the_family_s_processor(family, tmp_path):
    ImageProcessor().save(tmp_path, family)
    found = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert found["processor_class"] == PROCESSOR_CLASSES[family]


def test_no_picture_gives_empty_arrays():
    pixels, grids = ImageProcessor()([])
    assert pixels.shape == (0, 1176) and grids.shape == (0, 3)


def colours(mode):
    """40 x 40 of mid grey or red, one corner clear where the mode can be."""
    if mode == "LA":
        image = Image.new("LA", (40, 40), (100, 255))
        image.paste((100, 0), (0, 0, 10, 10))
    elif mode == "RGBA":
        image = Image.new("RGBA", (40, 40), (200, 0, 0, 255))
        image.paste((200, 0, 0, 0), (0, 0, 10, 10))
    elif mode == "P":
        image = Image.new("P", (40, 40), 1)
        image.putpalette([0, 0, 0, 200, 0, 0])
        image.paste(0, (0, 0, 10, 10))
        image.info["transparency"] = 0
    elif mode == "CMYK":
        image = Image.new("CMYK", (40, 40), (0, 255, 255, 55))
    elif mode == "1":
        image = Image.new("1", (40, 40), 1)
    elif mode == "I;16":
        image = Image.fromarray(np.full((40, 40), 100 * 257, np.uint16))
    else:
        image = Image.new("L", (40, 40), 100)
    assert image.mode == mode
    return image


@pytest.mark.case("A-M15")
@pytest.mark.parametrize(
    ("mode", "corner", "middle"),
    [
        ("L", (100, 100, 100), (100, 100, 100)),
        ("LA", (255, 255, 255), (100, 100, 100)),
        ("RGBA", (255, 255, 255), (200, 0, 0)),
        ("P", (255, 255, 255), (200, 0, 0)),
        ("1", (255, 255, 255), (255, 255, 255)),
        ("I;16", (100, 100, 100), (100, 100, 100)),
        ("CMYK", (200, 0, 0), (200, 0, 0)),
    ],
)
def test_colour_modes(mode, corner, middle):
    image = colours(mode)
    kind, options = ("TIFF", {}) if mode == "CMYK" else ("PNG", {})
    for source in (image, encoded(image, kind, **options)):
        loaded = load_picture(source)
        pixels = np.asarray(loaded)
        assert loaded.mode == "RGB" and pixels.shape == (40, 40, 3) and pixels.dtype == np.uint8
        assert tuple(pixels[2, 2]) == corner
        assert tuple(pixels[30, 30]) == middle


@pytest.mark.case("A-M16")
def test_the_cameras_rotation_is_obeyed_for_every_kind_of_source(tmp_path):
    stored = Image.new("RGB", (640, 480), "white")
    stored.paste((255, 0, 0), (0, 0, 40, 480))  # the stored left edge
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(stored, "JPEG", exif=exif, quality=95)
    path = tmp_path / "turned.jpg"
    path.write_bytes(data)
    found = [load_picture(source) for source in (data, path, str(path), Image.open(path))]
    for image in found:
        pixels = np.asarray(image).astype(int)
        assert image.size == (480, 640)
        assert pixels[5, 240, 0] > 200 and pixels[5, 240, 1] < 80  # red on top
        assert pixels[600, 240, 1] > 200
        assert np.array_equal(pixels, np.asarray(found[0]))
    _, grids = ImageProcessor()(found[:1])
    assert grids.tolist() == [[1, 46, 34]]


@pytest.mark.case("A-M16")
@pytest.mark.parametrize("orientation", range(1, 9))
def test_all_eight_orientations_show_the_same_picture(orientation):
    """Stored as the tag says, all come out with red above, blue on the left below."""
    upright = Image.new("RGB", (32, 48), "white")
    upright.paste((255, 0, 0), (0, 0, 32, 8))
    upright.paste((0, 0, 255), (0, 8, 8, 48))
    turns = [
        None,
        Image.Transpose.FLIP_LEFT_RIGHT,
        Image.Transpose.ROTATE_180,
        Image.Transpose.FLIP_TOP_BOTTOM,
        Image.Transpose.TRANSPOSE,
        Image.Transpose.ROTATE_90,  # what a viewer turns back
        Image.Transpose.TRANSVERSE,
        Image.Transpose.ROTATE_270,
    ]
    turn = turns[orientation - 1]
    stored = upright if turn is None else upright.transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    loaded = load_picture(encoded(stored, "PNG", exif=exif))
    assert np.array_equal(np.asarray(loaded), np.asarray(upright))


@pytest.mark.case("A-M16")
def test_a_broken_rotation_tag_turns_nothing():
    data = encoded(Image.new("RGB", (32, 16), "red"), "JPEG", exif=b"Exif\0\0no such block")
    assert load_picture(data).size == (32, 16)


@pytest.mark.case("A-M15")
@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF", "MPO"])
def test_of_several_frames_the_first_counts(kind):
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    assert Image.open(io.BytesIO(data)).n_frames == 2
    pixel = load_picture(data).getpixel((5, 5))
    assert pixel[0] > 250 and max(pixel[1:]) < 5


def broken_pictures():
    data = encoded(picture(64, 64), "JPEG")
    huge = bytearray(encoded(Image.new("1", (8, 8))))
    huge[16:24] = (20000).to_bytes(4, "big") * 2
    huge[29:33] = zlib.crc32(huge[12:29]).to_bytes(4, "big")  # or the header would not be believed
    return {
        "cut": data[:-17],
        "huge": bytes(huge),
        "text": b"this is no picture",
        "empty": b"",
        "float": encoded(Image.new("F", (8, 8)), "TIFF"),
    }


@pytest.mark.case("A-M17")
@pytest.mark.parametrize("kind", ["cut", "huge", "text", "empty", "float"])
def test_a_broken_picture_is_a_typed_error_with_its_name(kind, tmp_path):
    data = broken_pictures()[kind]
    with pytest.raises(PictureError, match="row_17"):
        load_picture(data, name="row_17")
    path = tmp_path / "broken.jpg"
    path.write_bytes(data)
    with pytest.raises(PictureError, match=r"broken\.jpg"):
        load_picture(path)


@pytest.mark.case("A-M17")
def test_an_enormous_picture_costs_no_memory():
    tracemalloc.start()
    with pytest.raises(PictureError, match="400000000 pixels.* limit"):
        load_picture(broken_pictures()["huge"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.case("A-M17")
def test_size_is_refused_before_decoding():
    with pytest.raises(PictureError, match="64 x 64 px is above the limit of 4000 px"):
        load_picture(encoded(picture(64, 64)), max_pixels=4000)
    with pytest.raises(PictureError, match="missing"):
        load_picture("missing.png")
