"""Many rows: memory stays flat, each row comes once."""

import pytest

from tests.data import scale


@pytest.mark.slow
def test_a_hundred_thousand_rows_take_no_more_memory_than_twenty_thousand(tmp_path):
    found = scale.main(tmp_path)
    for stage, figures in found.items():
        print(stage, figures)
        early, _, late = figures["own_mb"]
        # What grows is the index (ids and questions), about 200 bytes a row.
        assert late - early < 80_000 * 1000 / 1e6
    assert found["prepare"]["rows"] == 100_000
