"""What the file with the cursors still says of a row that landed plain, once its contract says encrypted."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnisupport_ingest.sources.query.events import image_hash
from omnisupport_ingest.sources.query.state import FILE, Progress, QueryState, Seen

PLAIN, ENCRYPTED = image_hash('{"id":"1","email":"a@x.org"}'), image_hash('{"id":"1","encrypted:1":"…"}')


def _bytes_of(image: int) -> bytes:
    # SQLite's integers are big-endian, and this one needs all eight bytes.
    return image.to_bytes(8, "big", signed=True)


@pytest.mark.parametrize("how", ["lands again", "below the lookback"])
def test_no_hash_of_a_plain_image_stays_in_the_file(tmp_path: Path, how: str) -> None:
    progress = Progress(1, "bigint")
    with QueryState(tmp_path) as state:
        state.save("public.people", progress, [Seen('["1"]', 7, PLAIN), Seen('["2"]', 7, 2)])
        assert _bytes_of(PLAIN) in (tmp_path / FILE).read_bytes()
        if how == "lands again":
            state.save("public.people", progress, [Seen('["1"]', 7, ENCRYPTED)], replaced=True)
            assert state.versions("public.people", ['["1"]']) == {'["1"]': [Seen('["1"]', 7, ENCRYPTED)]}
            assert state.versions("public.people", ['["2"]']) == {'["2"]': [Seen('["2"]', 7, 2)]}
        else:
            state.save("public.people", progress, below=8)
    assert _bytes_of(PLAIN) not in (tmp_path / FILE).read_bytes()
