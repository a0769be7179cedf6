import pytest

from tests.conftest import compiler


@pytest.fixture(scope="package", autouse=True)
def quick():
    with compiler(is_quick=True):
        yield
